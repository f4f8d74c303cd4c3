"""The reference: runs any graph op by op in NumPy. In float64 it is the ground truth of every test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from opgraph.errors import InvalidArguments, InvalidShape, Unimplemented
from opgraph.ir import dtypes, opdef
from opgraph.ir.argument_checks import given_graph
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.schema import inferred_dims
from opgraph.ops.conversion import cast
from opgraph.partition.partition import NATIVE
from opgraph.runtime import array_exchange
from opgraph.runtime.foreign_nodes import check_foreign, check_onnx
from opgraph.runtime.graph_arguments import Ports

#: A function that runs an op without a formula in opgraph: it takes the op and its inputs, and returns its outputs.
Foreign: TypeAlias = Callable[[Op, tuple[np.ndarray, ...]], Sequence[np.ndarray]]
#: A callback for every value that an op produces.
Watch: TypeAlias = Callable[[LogicalTensor, np.ndarray], None]


def evaluate(
    graph: Graph,
    feeds: Mapping[Any, Any] | None = None,
    /,
    *,
    dtype: str | None = "f64",
    foreign: Foreign | None = None,
    watch: Watch | None = None,
    **named: Any,
) -> Any:
    """Runs a graph by the definitions of its ops, one after the other.

    Args:
        graph: finalized by this call if necessary.
        feeds: arrays by name or tensor id, for names that are no identifiers; NumPy, torch, or any object with DLPack.
            dtypes and shapes must be those declared.
        dtype: "f64": every float tensor is computed in float64, and casts between floats do nothing: the ground truth.
            Another float dtype: the same in that dtype. None: every op's result is rounded to its declared dtype; f16
            and bf16 ops compute in f32 and round once.
        foreign: runs ops that wrap a foreign op. It receives arrays in the working dtype, and its results are converted
            to that dtype. If omitted, onnx's own evaluator runs the nodes of an ONNX model, and torch their gradients.
        watch: called with each tensor that an op makes, and its value, which it must not change.
        named: arrays by name. An input called `dtype`, `foreign` or `watch` must be in `feeds`.

    Returns: the output, or a dict of them by name in declaration order; in the kind of array that was given.

    Raises:
        InvalidArguments, InvalidDataType, InvalidShape: arrays do not fit the declarations, or each other.
        Unimplemented: an op has no formula and there is no `foreign`, or a formula needs SciPy, which is missing.
    """
    if dtype is not None and dtype not in dtypes.FLOATS:
        raise InvalidArguments(
            f"cannot evaluate in {dtype!r}", where="evaluate", fix=f"use None or one of {', '.join(dtypes.FLOATS)}"
        )
    given_graph(graph, "evaluate")
    feeds, named, kind = array_exchange.imported(feeds, named)
    arrays = Ports(graph.inputs, "input", graph.defaults).bind(feeds, named)
    with np.errstate(all="ignore"):  # overflow and NaN are results like others
        values = {t.id: _in_working_dtype(a, dtype) for t, a in zip(graph.inputs, arrays, strict=True)}
        values.update((t.id, _in_working_dtype(opdef.array_of(t), dtype)) for t in graph.constants)
        results = _run_all(graph.ops, graph.outputs, values, dtype, foreign, watch)
    if kind is not None:
        results = [array_exchange.exported(r, kind) for r in results]
    names = Ports(graph.outputs, "output").names
    return results[0] if len(results) == 1 else dict(zip(names, results, strict=True))


def results_of(
    ops: Sequence[Op], outputs: Sequence[LogicalTensor], inputs: Mapping[int, np.ndarray]
) -> list[np.ndarray]:
    """The results of ops that wrap no foreign ones, each rounded to its declared dtype.

    Args:
        inputs: by tensor id; constants need not be given.

    Raises:
        InvalidShape: the inputs do not fit an op.
    """
    constants = {t.id: opdef.array_of(t) for op in ops for t in op.inputs if t.is_constant}
    with np.errstate(all="ignore"):
        return _run_all(ops, outputs, {**constants, **inputs}, None, None, None)


def _run_all(
    ops: Sequence[Op],
    outputs: Sequence[LogicalTensor],
    values: dict[int, np.ndarray],
    dtype: str | None,
    foreign: Foreign | None,
    watch: Watch | None,
) -> list[np.ndarray]:
    kept = {t.id for t in outputs}
    last = {t.id: op.id for op in ops for t in op.inputs}
    for op in ops:
        made = list(zip(op.outputs, _run(op, values, dtype, foreign), strict=True))
        values.update((t.id, array) for t, array in made)
        if watch is not None:
            for tensor, array in made:
                watch(tensor, array)
        for tensor in op.inputs:
            if last[tensor.id] == op.id and tensor.id not in kept:
                values.pop(tensor.id, None)
    return [values[t.id] for t in outputs]


def _run(op: Op, values: Mapping[int, np.ndarray], dtype: str | None, foreign: Foreign | None) -> Sequence[np.ndarray]:
    record = opdef.get(op.kind, where=op.label)
    arrays = tuple(values[t.id] for t in op.inputs)
    if record.reference is None:
        return [] if not op.outputs else _run_foreign(op, arrays, dtype, foreign)
    # Known shapes were checked when the graph was finalized; the result of a foreign node may have another shape.
    if record.inputs_that_say_shapes(op) or any(
        t.dims != array.shape for t, array in zip(op.inputs, arrays, strict=True)
    ):
        check_shapes(op, record, arrays)
    results: list[np.ndarray] = []
    for part in record.parts(op):
        working = [dtype if dtype is not None and t.dtype in dtypes.FLOATS else t.dtype for t in part.outputs]
        given = tuple(values[t.id] for t in part.inputs)
        results += by_reference(part, opdef.get(part.kind, where=op.label), given, working)
    return results


def by_reference(
    op: Op, record: opdef.OpDef, arrays: Sequence[np.ndarray], result_dtypes: Sequence[str]
) -> list[np.ndarray]:
    """The results of one op by its definition, each in its given dtype: f16 and bf16 compute in f32 and round once."""
    assert record.reference is not None
    wide = [a.astype(np.float32) if a.dtype.itemsize == 2 else a for a in arrays]
    told = {"to": result_dtypes[0]} if record.by_dtype else {}
    made = record.reference(*wide, **op.attrs, **told)
    results = made if record.returns_several else (made,)
    return [cast(r, d) for r, d in zip(results, result_dtypes, strict=False)]


def _run_foreign(
    op: Op, arrays: tuple[np.ndarray, ...], dtype: str | None, foreign: Foreign | None
) -> Sequence[np.ndarray]:
    if foreign is not None:
        made = [_value(a) for a in foreign(op, arrays)]
    elif "onnx_op" in op.attrs:
        made = _by_library(op, arrays, dtype)
        if dtype is None:
            made = [cast(a, t.dtype) if t.dtype in dtypes.FLOATS else a for a, t in zip(made, op.outputs)]
    else:
        raise Unimplemented(
            f"the reference has no formula for {op.kind}",
            where=op.where,
            fix="pass foreign=, a function that runs it",
        )
    if len(made) != len(op.outputs):
        raise InvalidArguments(
            f"foreign returned {len(made)} arrays for {len(op.outputs)} outputs",
            where=op.where,
            fix="return one array for each output",
        )
    return [_in_working_dtype(a, dtype) for a in made]


def _by_library(op: Op, arrays: tuple[np.ndarray, ...], dtype: str | None) -> list[np.ndarray]:
    """Runs an ONNX node with onnx's own evaluator, its gradient with torch."""
    if opdef.get(op.kind, where=op.label).foreign == NATIVE:
        check_foreign([op])
        from opgraph.runtime.providers.torch_onnx.adjoint import reference_adjoint  # needs torch

        return reference_adjoint(op, arrays)
    check_onnx(op)
    from opgraph.runtime.providers.onnx_evaluator import reference_foreign

    return [_value(a) for a in reference_foreign(op, arrays, dtypes.get(dtype or "f64").numpy)]


def _value(made: Any) -> Any:
    """Converts to an array; a value that is no array in ONNX (a sequence, an absent optional) stays unchanged."""
    return made if made is None or isinstance(made, list) else np.asarray(made)


def _in_working_dtype(array: Any, dtype: str | None) -> Any:
    # An ONNX model may have dtypes that opgraph lacks; they pass unchanged.
    if isinstance(array, list):
        return [_in_working_dtype(_value(item), dtype) for item in array]
    if array is None:
        return None
    if dtype is None or not any(array.dtype == dtypes.BY_NAME[name].numpy for name in dtypes.FLOATS):
        return array
    return cast(array, dtype)


def check_shapes(op: Op, record: opdef.OpDef, arrays: Sequence[Any]) -> None:
    """Applies the op's shape rule to actual shapes, for a case where the declared ones are incomplete.

    Args:
        arrays: its inputs, of any library. The rule reads the numbers in inputs that specify a shape.

    Raises:
        InvalidShape: the arrays do not fit together.
    """
    numbers = told_numbers(op, record, arrays)
    actual: tuple[LogicalTensor, ...] = tuple(
        t.with_(dims=tuple(a.shape), strides=None, data=numbers.get(t.id, t.data))
        for t, a in zip(op.inputs, arrays, strict=True)
    )
    where = f"{op.label} (shapes: {', '.join(str(list(a.shape)) for a in arrays)})"
    for tensor, dims in zip(op.outputs, inferred_dims(record, actual, op.attrs, where), strict=False):
        declared = tensor.dims
        # If the attributes of an op are input data, only its result shows the shape.
        fits = (
            declared is None
            or dims is None
            or (
                len(dims) == len(declared)
                and all(not isinstance(d, int) or s in (d, None) for d, s in zip(declared, dims, strict=True))
            )
        )
        if not fits:
            raise InvalidShape(
                f"{tensor.label} is declared {tensor.type_text}, but has shape {list(dims or ())}",
                where=where,
                fix="feed arrays that fit, or leave the shape unknown (None)",
            )


def told_numbers(op: Op, record: opdef.OpDef, arrays: Sequence[Any]) -> dict[int, np.ndarray]:
    """The numbers in the inputs that specify a shape, by tensor id.

    Args:
        arrays: the inputs of the op, of any library.
    """
    said = {t.id for t in record.inputs_that_say_shapes(op)}
    return {
        t.id: np.array(a.tolist(), dtypes.get(t.dtype).numpy)
        for t, a in zip(op.inputs, arrays, strict=True)
        if t.id in said
    }
