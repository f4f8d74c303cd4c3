"""`opgraph.compile`: compiles a graph to an executable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, overload

from opgraph.errors import InvalidArguments
from opgraph.ir.argument_checks import given_graph
from opgraph.ir.graph import Graph
from opgraph.runtime.engine import Engine, engine_of
from opgraph.runtime.executable import Executable

if TYPE_CHECKING:
    from opgraph.runtime.training import TrainableExecutable


@overload
def compile(
    graph: Graph, device: str | Engine = "cpu", *, donate: Sequence[str] = (), rounding: str = "store", wrt: None = None
) -> Executable: ...


@overload
def compile(
    graph: Graph,
    device: str | Engine = "cpu",
    *,
    donate: Sequence[str] = (),
    rounding: str = "store",
    wrt: Sequence[str],
) -> TrainableExecutable: ...


def compile(
    graph: Graph,
    device: str | Engine = "cpu",
    *,
    donate: Sequence[str] = (),
    rounding: str = "store",
    wrt: Sequence[str] | None = None,
) -> Executable:
    """Partitions a graph, compiles the partitions and wires them together.

    Args:
        graph: finalized by this call if necessary.
        device: "cpu", "cuda", "cuda:1" or an Engine.
        donate: names of inputs whose memory a kernel overwrites with a result; their data are lost after a call.
            Refused unless it is proved to be correct (specs/training.md).
        rounding: "store": f16 and bf16 values inside a kernel are rounded once, when stored; "each": after every op,
            as eager torch does.
        wrt: names of inputs (or constants, which become inputs) to differentiate with respect to. The result then has
            `vjp` and `saved_tensors`.

    Returns: a callable: `f(x=array)`.

    Raises:
        OpGraphError: the graph is invalid, an op cannot be run, the device does not exist, or a kernel does not
            compile; with `wrt` also the errors of `gradient`.
        InvalidArguments: an input cannot be donated: backward or an output needs it, a library is its last reader, or
            no result of the kernel that reads it last fits.
    """
    given_graph(graph, "compile")
    if wrt is None:
        return Executable(graph, engine_of(device), donate=_names(donate, "donate"), rounding=rounding)
    from opgraph.runtime.training import TrainableExecutable  # imported for training only

    return TrainableExecutable(
        graph, engine_of(device), donate=_names(donate, "donate"), rounding=rounding, wrt=_names(wrt, "wrt")
    )


def _names(given: Sequence[str], what: str) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    names = tuple(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise InvalidArguments(f"{what}={given!r} is no list of names", where="compile", fix="give names of inputs")
    return names
