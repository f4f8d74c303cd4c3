"""What a caller asks of an export."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from opgraph.errors import InvalidArguments
from opgraph.partition.rules import NORMS, RULES

#: What a fused partition counts as in a summary, and in `keep`; one that reduces rows is the latter.
FUSED_UNIT, ROWS_UNIT = "fused", "rows"
DEFAULT_TARGET = "onnxruntime==1.31"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a graph is to be written; the arguments of `opgraph.onnx.save`, which says what they mean.

    Attributes:
        library: whether an onnxruntime library is to run the fused partitions.
        cuda: whether that serves onnxruntime's CUDA provider as well; then it has what both can run.
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
        """Whether a library is to have partitions that reduce rows: there are no kernels of them for GPUs yet."""
        return ROWS_UNIT not in self.keep and not self.cuda


def checked_keep(names: Collection[str]) -> frozenset[str]:
    """Names of units to keep.

    Raises:
        InvalidArguments: a text instead of a list, or a name that no unit has.
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
    """Whether a library is to serve the CUDA provider.

    Raises:
        InvalidArguments: there is to be no library.
    """
    if cuda and library is None:
        raise InvalidArguments("cuda is about a library, and none is asked for", where="cuda", fix="give ort_library")
    return bool(cuda)
