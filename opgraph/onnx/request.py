"""Options of one ONNX export."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from opgraph.errors import InvalidArguments
from opgraph.partition.rules import NORMS, RULES

#: The unit name of a fused partition in a summary and in `keep`; the second is for partitions that reduce rows.
FUSED_UNIT, ROWS_UNIT = "fused", "rows"
DEFAULT_TARGET = "onnxruntime==1.31"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options for writing a graph: the arguments of `opgraph.onnx.save`, which documents them.

    Attributes:
        library: True if an onnxruntime library runs the fused partitions.
        cuda: True if that library also serves onnxruntime's CUDA provider; it then holds the ops that both can run.
        keep: names of units that stay as they are.
    """

    form: str = "auto"
    target: str = DEFAULT_TARGET
    functions: bool = False
    opset: int | None = None
    library: bool = False
    cuda: bool = False
    keep: frozenset[str] = frozenset()

    @property
    def rows(self) -> bool:
        """True if a library includes partitions that reduce rows. These have no GPU kernels yet."""
        return ROWS_UNIT not in self.keep and not self.cuda


def checked_keep(names: Collection[str]) -> frozenset[str]:
    """Checks the names of units to keep.

    Raises:
        InvalidArguments: a string instead of a list, or a name that no unit has.
    """
    if isinstance(names, str):
        raise InvalidArguments(f"keep={names!r} is one text", where="keep", fix=f"give a list: keep=[{names!r}]")
    if not isinstance(names, Iterable):
        raise InvalidArguments(f"keep={names!r} is no list of names", where="keep", fix='give one: keep=["gelu"]')
    names = list(names)
    known = dict.fromkeys((*(rule.name for rule in (*RULES, *NORMS)), FUSED_UNIT, ROWS_UNIT))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidArguments(
            f"no unit is called {unknown[0]!r}", where="keep", fix=f"name some of {', '.join(known)}"
        )
    return frozenset(names)


def checked_cuda(cuda: bool, library: object | None) -> bool:
    """True if a library serves the CUDA provider.

    Raises:
        InvalidArguments: no library was requested.
    """
    if cuda and library is None:
        raise InvalidArguments("cuda is about a library, and none is asked for", where="cuda", fix="give ort_library")
    return bool(cuda)
