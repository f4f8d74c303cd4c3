"""What runs a partition, whatever it is made of: the one list of what the rest of the runtime asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from opgraph.codegen.kernel import KernelSource
    from opgraph.ir.logical_tensor import Dims
    from opgraph.runtime.operands import Operands

#: What `runs_in` says of a generated kernel.
GENERATED = "opgraph"
#: The `sources` of what no kernel is generated for.
NO_SOURCES: Mapping[str, KernelSource] = MappingProxyType({})
#: What repeats a call on the same arrays and checks nothing, and what must be kept for it beside them.
Repeated: TypeAlias = tuple[Callable[[], None], Any]


class Runner(Protocol):
    """What runs a partition: arrays of its input ports in, arrays of its output ports out."""

    @property
    def runs_in(self) -> str:
        """GENERATED, or the name of the library."""

    @property
    def sources(self) -> Mapping[str, KernelSource]:
        """The generated kernels so far, by name."""

    @property
    def spins(self) -> bool:
        """Whether idle threads of its library spin between calls."""

    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """The results; `outs` where given and written to."""

    def repeated(self, arrays: Sequence[Any], outs: Sequence[Any]) -> Repeated | None:
        """The same call with everything worked out; None where it takes a whole call."""


@runtime_checkable
class KernelRunner(Runner, Protocol):
    """A runner of a fused partition."""

    @property
    def operands(self) -> Operands:
        """What the kernel reads, and which results may lie over it."""


@runtime_checkable
class PreparedRunner(Protocol):
    """A runner that can compile its kernel before the first call."""

    def prepare(self, dims: Sequence[Dims]) -> None:
        """Compiles what dense inputs of these dimensions will need."""
