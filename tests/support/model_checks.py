"""Checks for any ONNX model: it loads and passes through everything, or one of opgraph's errors gives the reason."""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import random_models
from google.protobuf.message import DecodeError
from onnx import TensorProto
from schedules import cuda_launches, in_order, pointwise

import opgraph as og
from opgraph.codegen.kernel import cuda_source, host_source
from opgraph.errors import OpGraphError
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower
from opgraph.onnx.library.text import library_text
from opgraph.onnx.request import Request
from opgraph.onnx.save import drafted, to_model
from opgraph.runtime.providers.onnx_loop import evaluator
from opgraph.runtime.providers.onnx_region import drop_last_gaps

#: Files that once caused failures.
FINDINGS = Path(__file__).resolve().parents[1] / "fuzz" / "findings"
#: The allowed difference of two correct implementations of a short chain, by dtype.
TOLERANCES = {"float32": 2e-4, "float64": 1e-6, "float16": 5e-2, "bfloat16": 3e-1}
#: Values with more elements than this are not computed: a damaged model may state any size.
_LARGEST = 1 << 16


def loaded(model: onnx.ModelProto) -> og.Graph | None:
    """The graph, or None if the model was refused with three lines: the problem, its place and a fix."""
    try:
        return og.onnx.load(model)
    except OpGraphError as error:
        assert len(str(error).splitlines()) == 3, str(error)
        return None


def goes_back(graph: og.Graph, model: onnx.ModelProto | None = None) -> None:
    """The graph prints and parses, and every form of it saves as a fixed point, unless an error names the reason.

    Args:
        model: the model that it was read from; nothing may change in it without options.
    """
    constants = {t.name: t.data for t in graph.constants if t.data is not None and t.data.size > 64}
    assert og.parse(str(graph), constants=constants) == graph
    graph.explain()
    for options in ({"form": "decomposed"}, {}, {"form": "contrib"}, {"functions": True}):
        try:
            written = to_model(graph, **options)
        except OpGraphError as error:
            assert len(str(error).splitlines()) == 3, str(error)
            continue
        again = og.onnx.load(written)
        if options == {"form": "decomposed"} and not any(op.kind == "Swish" for op in graph.ops):
            assert again == graph
            assert model is None or written == model
        if not options.get("functions"):
            assert og.onnx.load(to_model(again, **options)) == again


def emits(graph: og.Graph) -> None:
    """Every fused partition has kernels for both targets, and the model chose no part of their text."""
    for part in graph.get_partitions():
        if part.kind != "fused":
            continue
        lowered = lower(part)
        shapes = [_shape(t) for t in lowered.loads]
        try:
            layout = bind(lowered.loop, shapes, [_strides(s) for s in shapes])
        except OpGraphError:
            continue  # sizes that are made up here for unknown ones do not fit together
        host_source(in_order(lowered.loop, layout.variant))
        if layout.size and (layout.variant.has_sums or layout.row_rank):
            cuda_launches(lowered.loop, layout)
        elif layout.size:
            cuda_source(pointwise(lowered.loop, layout))


def serves_a_library(graph: og.Graph, model: onnx.ModelProto) -> None:
    """With library ops as native ones, the model comes back and has kernels; so has a library of custom ops."""
    try:
        native = og.onnx.load(model, library=True)
    except OpGraphError as error:
        assert len(str(error).splitlines()) == 3, str(error)
        return
    emits(native)
    with contextlib.suppress(OpGraphError):
        assert to_model(native, form="decomposed") == to_model(graph, form="decomposed")
    with contextlib.suppress(OpGraphError):
        library_text(drafted(graph, Request(library=True)).library)


def _shape(tensor: Any) -> tuple[int, ...]:
    dims = () if tensor is None or tensor.dims is None else tensor.dims
    return tuple(d if isinstance(d, int) else 2 for d in dims)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(strides[::-1])


def is_small(graph: og.Graph) -> bool:
    """True if all values that state their sizes are small."""
    tensors = [*graph.inputs, *(t for op in graph.ops for t in (*op.inputs, *op.outputs))]
    return all(np.prod(_shape(t), dtype=object) <= _LARGEST for t in tensors)


def computed(graph: og.Graph, feeds: dict[str, Any], *, compiled: bool = False) -> list[np.ndarray] | None:
    """The outputs in the graph's own types, by kernels or by the definitions; None if the graph is refused.

    A model without damage is not refused: see `agrees`.
    """
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            run = og.compile(graph) if compiled else None
            made = run(feeds) if run is not None else og.evaluate(graph, feeds, dtype=None)
    except OpGraphError as error:
        assert len(str(error).splitlines()) == 3, str(error)
        return None
    return [np.asarray(v) for v in (made.values() if isinstance(made, dict) else [made])]


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[np.ndarray] | None:
    """The outputs by onnxruntime; None if it does not accept the model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    closed = onnx.ModelProto.FromString(model.SerializeToString())
    drop_last_gaps(closed.graph.node)
    try:
        session = onnxruntime.InferenceSession(closed.SerializeToString(), options)
        return [np.asarray(v) for v in session.run(None, feeds)]
    except Exception:  # its exceptions share no base class
        return None


def by_evaluator(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[np.ndarray] | None:
    """The outputs by onnx's own evaluator; None if it does not accept the model."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return [np.asarray(v) for v in evaluator(model).run(None, feeds)]
        except Exception:  # nor do the evaluator's
            return None


def expected(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[np.ndarray] | None:
    """The outputs by onnxruntime, else by onnx's evaluator; None if neither accepts the model."""
    found = by_onnxruntime(model, feeds)
    return found if found is not None else by_evaluator(model, feeds)


def has_an_answer(model: onnx.ModelProto) -> bool:
    """True if ONNX defines the results of a model. It does not define the conversion of a number that an integer cannot
    hold, nor the spelling of a formula, which decides between NaN and infinity where an attribute is not finite."""
    bodies = [model.graph.node, *(f.node for f in model.functions)]
    attributes = [(node.op_type, a) for body in bodies for node in body for a in node.attribute]
    attributes += [("", a) for function in model.functions for a in function.attribute_proto]
    unsigned = {TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64}
    return all(math.isfinite(a.f) and not (op == "Cast" and a.name == "to" and a.i in unsigned) for op, a in attributes)


def agrees(got: list[np.ndarray], want: list[np.ndarray], model: onnx.ModelProto) -> None:
    """Fails if results differ by more than the rounding of their type through a short chain.

    Args:
        got: one value for each output name; a name that is listed twice is given once.
        want: one for each output.
    """
    by_name = dict(zip((value.name for value in model.graph.output), want, strict=True))
    for (name, theirs), ours in zip(by_name.items(), got, strict=True):
        tolerance = TOLERANCES.get(ours.dtype.name, 0.0)
        assert ours.shape == theirs.shape, name
        if tolerance:
            ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def survives(model: onnx.ModelProto, rng: Any) -> str:
    """Takes a model through everything: loading, text, every form, kernels, running, comparing.

    Returns: "refused", "loaded", or "agreed" if another implementation runs it, too.
    """
    graph = loaded(model)
    if graph is None:
        return "refused"
    goes_back(graph)
    emits(graph)
    serves_a_library(graph, model)
    if not is_small(graph):
        return "loaded"
    try:
        feeds = random_models.feeds_of(model, rng)
    except KeyError:  # an input of a type for which no arrays are made here
        return "loaded"
    got = computed(graph, feeds)
    want = None if got is None or not has_an_answer(model) else expected(model, feeds)
    if got is None or want is None:
        return "loaded"
    try:
        agrees(got, want, model)
    except AssertionError:
        # A Clip to NaN, for example, is NaN by onnx's own definition, while onnxruntime ignores the bound.
        other = by_evaluator(model, feeds)
        if other is None:
            raise
        agrees(got, other, model)
    return "agreed"


def survives_bytes(content: bytes, rng: Any) -> str:
    """The same for the bytes of a file, which may not be a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        path.write_bytes(content)
        try:
            og.onnx.load(path)
        except OpGraphError as error:
            assert len(str(error).splitlines()) == 3, str(error)
            return "refused"
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        return "refused"
    return survives(model, rng)
