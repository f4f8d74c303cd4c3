"""The record of a peer: its name, how to find it, and how it builds a call for a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from opgraph.bench.case import Case


class Absent(Exception):  # noqa: N818 - an answer, not an error
    """A peer that is not on this machine; the message says why."""


class Refused(Exception):  # noqa: N818 - as above
    """A case that a peer does not take; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A call, ready to be timed.

    Attributes:
        call: runs once.
        returns: names of the outputs that `call` returns in new memory, as a tuple if there are several; () if it
            writes to the arrays of the case.
        note: a remark on the numbers.
    """

    call: Callable[[], Any]
    returns: tuple[str, ...] = ()
    note: str = ""

    @property
    def allocates(self) -> bool:
        """True if the time includes allocating the results."""
        return bool(self.returns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way to compute an entry.

    Attributes:
        name: its name in tables and in `--peers`.
        get: how to get it.
        devices: the devices on which it runs.
        find: returns its version, for a device; raises Absent.
        build: returns a call for a case; raises Refused, or any exception of the library.
    """

    name: str
    get: str
    find: Callable[[str], str]
    build: Callable[[Case], Built]
    devices: tuple[str, ...] = ("cpu", "cuda")


def dense(case: Case) -> None:
    """Raises Refused if an array of the case is not contiguous in row-major order."""
    for name, array in {**case.feeds, **case.outs}.items():
        lies = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()
        if not lies:
            raise Refused(f"takes dense arrays only; {name} is a view")


def forward_only(case: Case) -> None:
    """Raises Refused for backward."""
    if case.is_backward:
        raise Refused("computes no gradients")
