"""A dict of bounded size, for caches that would grow without limit if shapes change with every call."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict of at most `bound` entries; a new entry beyond them replaces the oldest.

    A lookup costs the same as in a dict. Threads may add entries concurrently. A copy is empty, as this is a cache.
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
