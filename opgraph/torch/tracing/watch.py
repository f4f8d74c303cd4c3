"""What a function does in torch besides computing on data: the calls on real tensors, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode

from opgraph.torch.tracing.proxy import proxies

#: What may be asked of a real tensor without its value.
_QUESTIONS = frozenset(
    (
        "shape", "dtype", "device", "ndim", "dim", "size", "numel", "nelement", "requires_grad", "is_floating_point",
        "is_complex", "ndimension", "element_size", "itemsize", "layout", "is_cuda", "is_cpu", "__len__", "is_tensor",
        "is_sparse", "is_quantized", "is_nested", "is_meta", "is_mkldnn", "is_same_size",
    )
)  # fmt: skip


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
        name = getattr(self.func, "__name__", "")
        return getattr(getattr(self.func, "__self__", None), "__name__", name) if name == "__get__" else name

    @property
    def is_question(self) -> bool:
        """Whether it asks for what is known of a tensor without its data."""
        return self.name in _QUESTIONS

    @property
    def changes(self) -> bool:
        """Whether it changes a tensor."""
        if self.name.startswith("__i"):
            return self.name not in ("__invert__", "__index__", "__int__", "__iter__")
        return self.name == "__setitem__" or (self.name.endswith("_") and not self.name.endswith("__"))


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
