"""Gradients: from a graph to the graph of its gradient, by the rules in the records of its ops.

The result recomputes the forward values that it needs, so that one fused kernel reads inputs and writes gradients. Like
any other graph it can be partitioned, compiled, exported and differentiated again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from opgraph.errors import InvalidArguments, InvalidDataType
from opgraph.ir import dtypes
from opgraph.ir.argument_checks import given_graph
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import port_name
from opgraph.transforms.masks import Told
from opgraph.transforms.reverse import Reverse
from opgraph.transforms.units import freed, named, with_symbols


def gradient(graph: Graph, wrt: Sequence[str]) -> Graph:
    """The graph that computes gradients of a graph's outputs with respect to some of its inputs.

    Args:
        graph: finalized by this call if need be.
        wrt: names of inputs, or of constants, which become inputs.

    Returns: a finalized graph. Its inputs are the inputs of `graph` that it needs, with their names, and `d_<output>`
        for each output that depends on `wrt`: the gradient of a scalar with respect to that output, with its dtype and
        shape. Its outputs are `d_<name>` for each name of `wrt`, in that order, with the dtype and shape of that input:
        sum over outputs of d_output times the derivative. It recomputes forward values; nothing else has to be saved.

    Raises:
        InvalidArguments: `wrt` is empty, contains a name that is not an input or constant, or contains a name twice.
        InvalidDataType: an input of `wrt` does not hold floats.
        Unimplemented: an op on the way has no gradient; the message gives the reason.

    The branch of a Select that is not taken adds nothing to the gradient, even where that branch is infinite or NaN.
    A branch that was broadcast to the shape of the condition adds 0 times its derivative, and so does one with an op
    between it and the Select that is not elementwise, such as a reshape or a transposition.
    Source: reverse accumulation; Griewank and Walther, Evaluating Derivatives, 2nd edition, 2008.
    """
    return differentiated(prepared(graph, wrt), wrt)


def prepared(graph: Graph, wrt: Sequence[str], *, units: bool = True) -> Graph:
    """The graph in the form that `differentiated` takes; see `gradient` for arguments and errors.

    Args:
        units: true if named units become single ops.
    """
    given_graph(graph, "gradient")
    if not isinstance(wrt, Iterable):
        raise InvalidArguments(f"got {type(wrt).__name__}", where="wrt", fix="give names of inputs: wrt=('x',)")
    names = [wrt] if isinstance(wrt, str) else list(wrt)
    # An input comes before a constant of its name.
    known = {port_name(t): t for t in (*graph.constants, *graph.inputs)}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise InvalidArguments(
                f"there is no input or constant {name!r}", where="wrt", fix=f"choose among {', '.join(known) or 'none'}"
            )
        if known[name].dtype not in dtypes.FLOATS:
            raise InvalidDataType(
                f'"{name}" is {known[name].type_text}, which has no gradient', where="wrt", fix="leave it out of wrt"
            )
    if not names or len(set(names)) != len(names):
        raise InvalidArguments(
            "no input is named" if not names else "an input is named twice", where="wrt", fix="name each input once"
        )
    for name in names:
        alike = [t.id for t in graph.constants if port_name(t) == name]
        if known[name].is_constant and len(alike) > 1:
            raise InvalidArguments(
                f"two constants are called {name!r}", where=f"wrt: tensors {alike[0]} and {alike[1]}", fix="rename one"
            )
    graph = with_symbols(freed(graph, names))
    return named(graph) if units else graph


def differentiated(
    graph: Graph,
    wrt: Sequence[str],
    *,
    given: Collection[int] = (),
    from_outputs: Collection[int] = (),
    masks: Mapping[int, Told] | None = None,
    by_choice: Collection[int] = (),
    outputs: Collection[str] | None = None,
) -> Graph:
    """The gradient of a prepared graph.

    Args:
        given: ids of forward values that are inputs of the result instead of being recomputed.
        from_outputs: ids of ops whose gradient is taken from their output (`OpDef.gradient_from_output`).
        masks: conditions, by id, that are recomputed from an output; the output is an input of the result.
        by_choice: ids of ops whose rule, a Backward kind, is used in its Select form (`conditions.by_choice`).
        outputs: names of the outputs whose gradients are given; the others are taken as zero. None: all.
    """
    names = [wrt] if isinstance(wrt, str) else wrt
    return Reverse(graph, names, given, from_outputs, masks or {}, by_choice).graph(outputs)
