"""What a function does in torch besides computing on data: the calls on real tensors, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode

from opgraph.torch.tracing.proxy import proxies
from opgraph.torch.tracing.questions import QUESTIONS
from opgraph.torch.writes import told_to_write, writes


def function_name(func: Callable[..., Any]) -> str:
    """How messages call a torch function; the attribute's name for a getter, "" where it has none."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


@dataclass(frozen=True, slots=True, eq=False)
class EagerCall:
    """One call of torch on real tensors, and its result."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """The function's name; for a getter, the attribute's."""
        return function_name(self.func)

    @property
    def is_question(self) -> bool:
        """Whether it asks for what is known of a tensor without its data."""
        return self.name in QUESTIONS

    @property
    def changes(self) -> bool:
        """Whether it changes a tensor."""
        return writes(self.func) or told_to_write(self.kwargs)


class Watch(TorchFunctionMode):
    """Notes the calls on real tensors while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[EagerCall] = []
        self.paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        given = kwargs or {}
        result = func(*args, **given)
        if not self.paused and next(proxies((*args, *given.values())), None) is None:
            self.calls.append(EagerCall(func, args, given, result))
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Notes nothing: what opgraph itself asks torch is not the function's doing."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call that a session made on its arguments."""
        self.calls.append(EagerCall(func, args, kwargs, result))
