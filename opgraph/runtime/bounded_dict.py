"""A dict that forgets: what is kept from call to call must not pile up where shapes change with every call."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict of at most so many entries: what is added beyond them takes the place of the oldest.

    Looking up costs what it costs in a dict; threads may add at once. A copy is empty: it is a cache.
    """

    __slots__ = ("bound",)

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound

    def __setitem__(self, key: K, value: V) -> None:
        while len(self) >= self.bound and key not in self:
            with suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
                del self[next(iter(self))]
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Bounded, (self.bound,)
