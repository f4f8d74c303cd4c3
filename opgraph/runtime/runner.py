"""The interface between the runtime and anything that executes a partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from opgraph.codegen.kernel import KernelSource
    from opgraph.ir.logical_tensor import Dims
    from opgraph.runtime.operands import Operands

#: The value of `runs_in` for a generated kernel.
GENERATED = "opgraph"
#: The `sources` of a runner without generated kernels.
NO_SOURCES: Mapping[str, KernelSource] = MappingProxyType({})
#: A function that repeats a call on the same arrays without checks, and an object that must be kept alive for it.
Repeated: TypeAlias = tuple[Callable[[], None], Any]


class Runner(Protocol):
    """Executes a partition: takes arrays of its input ports, and returns arrays of its output ports."""

    @property
    def runs_in(self) -> str:
        """GENERATED, or the name of the library."""

    @property
    def sources(self) -> Mapping[str, KernelSource]:
        """The kernels generated so far, by name."""

    @property
    def spins(self) -> bool:
        """True if idle threads of its library spin between calls."""

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """Runs the partition; returns the results, in `outs` where given."""

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> Repeated | None:
        """Returns the prepared call; None if repeating takes a whole call."""


@runtime_checkable
class KernelRunner(Runner, Protocol):
    """A runner of a fused partition."""

    @property
    def operands(self) -> Operands:
        """The operands of the kernel, and the results that may overwrite them."""


@runtime_checkable
class PreparedRunner(Protocol):
    """A runner that can compile its kernel before the first call."""

    def prepare(self, dims: Sequence[Dims]) -> None:
        """Compiles the kernels that dense inputs of these dimensions will need."""
