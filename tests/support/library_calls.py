"""Ways to call each library op: shapes of its inputs, and attributes. The kinds come from the registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.ir.graph_builder import GraphBuilder
from opgraph.ir.opdef import OpDef, Port, all_ops

#: The ops that a library runs: every native kind that is no loop over elements. Quantization, whose operands have
#: dtypes of their own, has its own tests.
LIBRARY = tuple(r for r in all_ops() if r.family not in ("pointwise", "sum", "structural", "quantization"))
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call: the shapes of its inputs, its attributes, and its number of outputs.

    Attributes:
        given: inputs, by position, whose values are fixed (shapes).
    """

    shapes: Sequence[Shape]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    given: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{list(self.shapes)} {dict(self.attrs)}"


_REDUCTIONS = [
    Call([(3, 4, 5)], {"axes": (1,)}),
    Call([(3, 4, 5)], {"axes": (-1, 0)}),
    Call([(3, 4, 5)], {"axes": (-1, 0), "keep_dims": True}),
    Call([(3, 4, 5)], {"axes": (0, 1, 2)}),
    Call([(3, 4, 5)], {"axes": ()}),
    Call([(3, 0, 5)], {"axes": (0,)}),
    Call([(1,)], {"axes": (0,)}),
]
_MATMULS = [
    Call([(3, 4), (4, 5)]),
    Call([(4, 3), (4, 5)], {"transpose_a": True}),
    Call([(3, 4), (5, 4)], {"transpose_b": True}),
    Call([(4, 3), (5, 4)], {"transpose_a": True, "transpose_b": True}),
    Call([(2, 1, 3, 4), (6, 4, 5)]),
    Call([(6, 4, 3), (2, 1, 5, 4)], {"transpose_a": True, "transpose_b": True}),
    Call([(2, 3, 4), (4, 5), (5,)]),
    Call([(3, 4), (5, 4), (3, 1)], {"transpose_b": True}),
    Call([(2, 3, 4), (2, 4, 5), (2, 1, 5)]),
    Call([(4,), (4, 5)]),
    Call([(4,), (2, 5, 4)], {"transpose_a": True, "transpose_b": True}),
    Call([(2, 3, 4), (4,)]),
    Call([(2, 4, 3), (4,)], {"transpose_a": True}),
    Call([(4,), (4,)]),
    Call([(3, 0), (0, 5)]),
]
_SLICES: list[tuple[Shape, dict[str, Any]]] = [
    ((5, 6), {"starts": (1,), "ends": (4,), "axes": (0,)}),
    ((5, 6), {"starts": (-3, 0), "ends": (100, -1), "axes": (-1, 0)}),
    ((5, 6), {"starts": (0,), "ends": (6,), "axes": (1,), "steps": (4,)}),
    ((5, 6), {"starts": (-1, 4), "ends": (-100, 0), "axes": (1, 0), "steps": (-2, -1)}),
    ((5, 6), {"starts": (-100, 2), "ends": (3, 100), "axes": (0, 1)}),
    ((5, 6), {"starts": (3,), "ends": (2,), "axes": (0,)}),
    ((0, 6), {"starts": (0,), "ends": (2,), "axes": (0,)}),
]


def _sliced(shape: Shape, attrs: Mapping[str, Any]) -> Shape:
    record = next(r for r in LIBRARY if r.kind == "Slice")
    assert record.reference is not None
    return tuple(record.reference(np.zeros(shape), **attrs).shape)


_STATS = {"keep_stats": True}
_NO_STATS = {"keep_stats": False}
_PLAIN = {**_NO_STATS, "use_affine": False}
_NCX = {"data_format": "NCX"}
_SOFTMAXES: list[tuple[Shape, dict[str, Any]]] = [
    ((3, 4), {"axis": 1}),
    ((3, 4, 5), {"axis": -3}),
    ((3, 4, 5), {"axis": 1}),
    ((2, 0), {"axis": 1}),
    ((0, 3), {"axis": 1}),
]
_LAYER_NORMS: list[tuple[Shape, int, dict[str, Any]]] = [
    ((3, 4, 5), 1, {}),
    ((3, 4, 5), 2, {"begin_norm_axis": -2, "epsilon": 0.25}),
    ((3, 4, 5), 3, {"begin_norm_axis": 0}),
    ((3, 4, 5), 2, {"begin_norm_axis": 1}),
    ((6,), 1, {}),
]
_CHANNELS: list[tuple[Shape, int, dict[str, Any]]] = [
    ((3, 4, 5), 5, {"epsilon": 2.0**-17}),
    ((3, 4, 5), 4, {"epsilon": 0.25, **_NCX}),
    ((4, 3), 3, {"epsilon": 2.0**-17, **_NCX}),
    ((2, 3, 2, 2), 3, {"epsilon": 2.0**-10, **_NCX}),
]
_GROUPS: list[tuple[Shape, int, dict[str, Any]]] = [
    ((2, 3, 6), 6, {"groups": 2}),
    ((2, 6, 3), 6, {"groups": 3, **_NCX}),
    ((2, 4, 2, 3), 4, {"groups": 1, "epsilon": 0.25, **_NCX}),
    ((3, 4), 4, {"groups": 2}),
]


def _window(n: int, strides: int = 1, pads: tuple[int, int] = (0, 0), dilations: int = 1) -> dict[str, Any]:
    return {
        "strides": (strides,) * n,
        "pads_begin": (pads[0],) * n,
        "pads_end": (pads[1],) * n,
        "dilations": (dilations,) * n,
    }


#: Data, weights (as OIX), groups and the rest of Convolution.
_CONVOLUTIONS: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((2, 3, 5), (4, 3, 3), _window(1)),
    ((2, 4, 7), (6, 2, 3), {**_window(1, 2, (1, 1)), "groups": 2}),
    ((1, 2, 6, 5), (3, 2, 3, 2), _window(2, 2, (1, 0))),
    ((2, 3, 8, 7), (3, 1, 3, 3), {**_window(2, 2, (2, 1), 2), "groups": 3}),
    ((1, 2, 5, 6), (2, 2, 2, 3), {**_window(2, 3), "auto_pad": "SAME_LOWER"}),
    ((1, 2, 5, 6), (2, 2, 2, 3), {**_window(2, 2, (3, 3)), "auto_pad": "SAME_UPPER"}),
    ((1, 2, 5, 6), (2, 2, 2, 3), {**_window(2, 2, (3, 3)), "auto_pad": "VALID"}),
    ((1, 2, 4, 3, 3), (2, 2, 2, 2, 1), _window(3, 1, (0, 1))),
    ((0, 2, 4), (2, 2, 3), _window(1)),
]


def _nxc(shape: Shape) -> Shape:
    return (shape[0], *shape[2:], shape[1])


def _xio(shape: Shape) -> Shape:
    return (*shape[2:], shape[1], shape[0])


def _laid_out(
    data: Sequence[Shape], weights: Sequence[Shape], attrs: Mapping[str, Any], swapped: bool = False
) -> Iterator[tuple[list[Shape], list[Shape], dict[str, Any]]]:
    """A call in both layouts of data and of weights."""
    names = ("IOX", "XOI") if swapped else ("OIX", "XIO")
    for i, (data_format, weights_format) in enumerate((("NCX", names[0]), ("NXC", names[1]))):
        yield (
            [_nxc(s) if i else s for s in data],
            [_xio(s) if i else s for s in weights],
            {**attrs, "data_format": data_format, "weights_format": weights_format},
        )


def _sizes(data: Shape, weights: Shape, attrs: Mapping[str, Any]) -> Shape:
    """The shape of Convolution's result, as NCX."""
    record = next(r for r in LIBRARY if r.kind == "Convolution")
    assert record.reference is not None
    form = {"data_format": "NCX", "weights_format": "OIX"}
    return tuple(record.reference(np.zeros(data), np.zeros(weights), **attrs, **form).shape)


def _convolutions() -> Iterator[Call]:
    for data, weights, attrs in _CONVOLUTIONS:
        for i, ((x,), (w,), more) in enumerate(_laid_out([data], [weights], attrs)):
            yield Call([x, w, (weights[0],)][: 2 + i], more)


def _convolution_data() -> Iterator[Call]:
    for data, weights, attrs in _CONVOLUTIONS:
        small = _sizes(data, weights, attrs)
        for (x, y), (w,), more in _laid_out([data, small], [weights], attrs):
            as_input = more["data_format"] == "NXC" and len(x) == 4
            yield Call([y, w, (len(x),)], more, given={2: x}) if as_input else Call([y, w], {**more, "dst_shape": x})
    yield Call([(1, 2, 3), (2, 3, 2)], {**_window(1, 2), **_NCX, "weights_format": "OIX"})
    yield Call([(1, 2, 3), (2, 3, 2)], {**_window(1, 3), **_NCX, "weights_format": "OIX", "output_padding": (2,)})


def _convolution_weights(swapped: bool = False) -> Iterator[Call]:
    for data, weights, attrs in _CONVOLUTIONS:
        small = _sizes(data, weights, attrs)
        for (x, y), (w,), more in _laid_out([data, small], [weights], attrs, swapped):
            given = (y, x) if swapped else (x, y)
            as_input = more["data_format"] == "NXC" and len(x) == 4
            told = {**more, "weights_shape": w}
            yield Call([*given, (len(w),)], more, given={2: w}) if as_input else Call(given, told)


def _transposed_data() -> Iterator[Call]:
    for data, weights, attrs in _CONVOLUTIONS:
        for (x,), (w,), more in _laid_out([data], [weights], attrs, swapped=True):
            yield Call([x, w], more)


def _transposed() -> Iterator[Call]:
    for data, weights, attrs in _CONVOLUTIONS:
        small = _sizes(data, weights, attrs)
        for i, ((y,), (w,), more) in enumerate(_laid_out([small], [weights], attrs, swapped=True)):
            yield Call([y, w, (weights[1] * attrs.get("groups", 1),)][: 2 + i], more)
    for pads in ((1, 1), (0, 1)):
        more = {**_window(2, 2, pads), **_NCX, "weights_format": "IOX", "output_padding": (1, 0)}
        yield Call([(1, 2, 3, 4), (2, 3, 3, 3)], more)


#: Data as NCX, kernel, and the rest of a pool.
_POOLS: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((2, 3, 7), (3,), _window(1, 2)),
    ((1, 2, 5, 6), (2, 3), _window(2, 2, (1, 1))),
    ((1, 2, 5, 6), (2, 3), {**_window(2, 3), "rounding_type": "ceil"}),
    ((1, 2, 5, 6), (3, 2), _window(2, 1, (1, 0))),
    ((1, 2, 5, 6), (2, 2), {**_window(2, 2), "auto_pad": "SAME_UPPER"}),
    ((1, 2, 4, 3, 3), (2, 2, 1), _window(3, 1)),
    ((0, 2, 5), (2,), _window(1)),
    ((2, 3, 9), (3,), _window(1, 2, (1, 2), 2)),
]


def _pools(kind: str) -> Iterator[Call]:
    average, back = kind.startswith("Avg"), kind.endswith("Backward")
    for data, kernel, attrs in _POOLS:
        if average and attrs["dilations"][0] != 1:
            continue
        record = next(r for r in LIBRARY if r.kind == ("AvgPool" if average else "MaxPool"))
        own = {**attrs, "kernel": kernel}
        if average:
            own.pop("dilations")
            own["exclude_pad"] = False
        assert record.reference is not None
        small = record.reference(np.zeros(data), **own, data_format="NCX").shape
        for (x, y), _, more in _laid_out([data, small], [], own):
            more.pop("weights_format")
            if back:
                more.pop("rounding_type", None)
            for exclude in (False, True) if average else (None,):
                chosen = {**more, "exclude_pad": exclude} if average else more
                if kind == "AvgPoolBackward":
                    yield Call([y], {**chosen, "src_shape": x})
                    yield Call([y, (len(x),)], chosen, given={1: x})
                else:
                    yield Call([x, y] if back else [x, x] if kind == "MaxPoolTake" else [x], chosen)


def _interpolations(back: bool = False) -> Iterator[Call]:
    cases: list[tuple[Shape, Shape, dict[str, Any]]] = [
        ((2, 3, 5), (8,), {"mode": "nearest", "sizes": (8,)}),
        ((2, 3, 7), (3,), {"mode": "linear", "sizes": (3,)}),
        ((2, 3, 3), (5,), {"mode": "nearest", "scales": (1.66667,)}),
        ((1, 2, 4, 3), (6, 2), {"mode": "bilinear", "sizes": (6, 2)}),
        ((1, 2, 4, 3), (4, 1), {"mode": "linear", "sizes": (4, 1), "coordinate_transformation_mode": "align_corners"}),
        ((1, 2, 4, 3), (8, 9), {"mode": "linear", "scales": (2.0, 3.0)}),
        ((1, 1, 2, 3, 2), (3, 3, 4), {"mode": "trilinear", "sizes": (3, 3, 4)}),
        ((1, 2, 4), (7,), {"mode": "nearest", "sizes": (7,), "coordinate_transformation_mode": "align_corners"}),
    ]
    for data, sizes, attrs in cases:
        for (x, y), _, more in _laid_out([data, (*data[:2], *sizes)], [], attrs):
            more.pop("weights_format")
            given = [x, y] if back else [x]
            yield Call(given, more)
            if "sizes" in more:
                rest = {n: v for n, v in more.items() if n != "sizes"}
                yield Call([*given, (len(sizes),)], rest, given={len(given): sizes})


def _layer_norms() -> list[Call]:
    found = []
    for shape, last, attrs in _LAYER_NORMS:
        affine = shape[len(shape) - last :]
        found += [
            Call([shape], {**attrs, **_PLAIN}),
            Call([shape, affine, affine], {**attrs, **_NO_STATS}),
            Call([shape, affine, affine], {**attrs, **_STATS}, 3),
        ]
    return [*found, Call([(3, 4)], {"use_affine": False}, 3), Call([(3, 0)], _PLAIN), Call([(0, 3)], _PLAIN)]


def _layer_norm_backwards() -> list[Call]:
    found = []
    for shape, last, attrs in _LAYER_NORMS:
        lead, affine = shape[: len(shape) - last], shape[len(shape) - last :]
        inputs = [shape, shape, lead, lead]
        found += [
            Call(inputs, {**attrs, "use_affine": False}),
            Call([*inputs, affine], attrs, 3),
            Call([*inputs, affine, affine], attrs, 3),
        ]
    return found


CALLS: dict[str, list[Call]] = {
    "SoftMax": [
        *[
            Call([shape], {**attrs, "mode": m}, n)
            for shape, attrs in _SOFTMAXES
            for m in ("none", "inf_as_zero")
            for n in (1, 2)
        ]
    ],
    "SoftMaxBackward": [Call([shape, shape], attrs) for shape, attrs in _SOFTMAXES],
    "LogSoftmax": [Call([shape], attrs) for shape, attrs in _SOFTMAXES],
    "LogSoftmaxBackward": [Call([shape, shape], attrs) for shape, attrs in _SOFTMAXES],
    "LayerNorm": _layer_norms(),
    "LayerNormBackward": _layer_norm_backwards(),
    "RMSNorm": [call for s, k, attrs in _LAYER_NORMS for call in (Call([s], attrs), Call([s, s[len(s) - k :]], attrs))],
    "GroupNorm": [
        call
        for s, c, attrs in _GROUPS
        for call in (
            Call([s, (c,), (c,)], {**attrs, **_NO_STATS}),
            Call([s, (c,), (c,)], attrs, 3),
            Call([s], {**attrs, **_PLAIN}),
        )
    ],
    "BatchNormInference": [Call([s, *[(c,)] * 4], attrs) for s, c, attrs in _CHANNELS],
    "BatchNormForwardTraining": [
        Call([s, *[(c,)] * n], {**attrs, **more}, 5)
        for s, c, attrs in _CHANNELS
        for n, more in ((2, {}), (3, {"momentum": 0.75}), (4, {"momentum": 0.25}))
    ],
    "BatchNormTrainingBackward": [
        Call([s, s, *[(c,)] * n], attrs, outputs)
        for s, c, attrs in _CHANNELS
        for n, outputs in ((2, 1), (3, 3), (3, 2), (2, 3))
    ],
    **{r.kind: _REDUCTIONS for r in LIBRARY if r.family == "reduction"},
    "MatMul": _MATMULS,
    **{k: list(_pools(k)) for k in ("AvgPool", "MaxPool", "AvgPoolBackward", "MaxPoolBackward", "MaxPoolTake")},
    "Interpolate": list(_interpolations()),
    "InterpolateBackward": list(_interpolations(back=True)),
    "BiasAddBackward": [Call([(2, 3, 4)], {}), Call([(2, 3, 4)], _NCX), Call([(2, 3)], _NCX), Call([(0, 3)], {})],
    "PReLUBackward": [
        Call([(2, 3, 4), (4,), (2, 3, 4)], {}, 2),
        Call([(2, 3, 4), (3,), (2, 3, 4)], _NCX, 2),
        Call([(2, 3, 4), (2, 3, 4), (2, 3, 4)], _NCX, 2),
        Call([(2, 3, 4), (1, 3, 1), (2, 3, 4)], {}, 2),
        Call([(2, 3), (1,), (2, 3)], {}, 2),
    ],
    "Convolution": list(_convolutions()),
    "ConvolutionBackwardData": list(_convolution_data()),
    "ConvolutionBackwardWeights": list(_convolution_weights()),
    "ConvTranspose": list(_transposed()),
    "ConvTransposeBackwardData": list(_transposed_data()),
    "ConvTransposeBackwardWeights": list(_convolution_weights(swapped=True)),
    "StaticReshape": [
        Call([(2, 3, 4)], {"shape": (4, 6), "special_zero": False}),
        Call([(2, 3, 4)], {"shape": (0, -1), "special_zero": True}),
        Call([(2, 3, 4)], {"shape": (-1,), "special_zero": False}),
        Call([(0, 3)], {"shape": (5, 0), "special_zero": False}),
        Call([(1, 1)], {"shape": (), "special_zero": True}),
    ],
    "ReshapeTo": [Call([(2, 3, 4), (4, 6)]), Call([(1,), ()])],
    "StaticTranspose": [
        Call([(2, 3, 4)], {"order": (2, 0, 1)}),
        Call([(2, 3, 4)], {"order": (0, -1, -2)}),
        Call([()], {"order": ()}),
    ],
    "Unsqueeze": [Call([(3, 4)], {"axes": (0, -1)}), Call([()], {"axes": (0, 1)}), Call([(3,)], {"axes": ()})],
    "Squeeze": [Call([(1, 3, 1)], {"axes": (-1, 0)}), Call([(1, 3, 1)], {"axes": (2,)}), Call([(3,)], {"axes": ()})],
    "Concat": [
        Call([(2, 3), (2, 1), (2, 4)], {"axis": 1}),
        Call([(2, 3), (5, 3)], {"axis": -2}),
        Call([(2, 3)], {"axis": 0}),
        Call([(2, 0), (2, 3)], {"axis": 1}),
    ],
    "ConcatBackward": [
        Call([(2, 8), (2, 3), (2, 1), (2, 4)], {"axis": 1, "index": 2}),
        Call([(2, 8), (2, 3), (2, 5)], {"axis": -1, "index": 0}),
    ],
    "Slice": [Call([shape], attrs) for shape, attrs in _SLICES],
    "SliceBackward": [Call([_sliced(shape, attrs), shape], attrs) for shape, attrs in _SLICES],
}


def graph_of(record: OpDef, call: Call, dtype: str, unknown: str = "") -> og.Graph:
    """The op alone: inputs x0, x1, ..., output y.

    Args:
        unknown: "sizes", "symbols" or "rank": the part of the inputs' shapes that is not declared.
    """
    g = og.Graph()
    inputs = []
    for number, (port, shape) in enumerate(zip(record.with_optional(len(call.shapes)), call.shapes)):
        dims: Any = shape
        if unknown:
            dims = {
                "sizes": (None,) * len(shape),
                "symbols": tuple(f"n{s}" if s > 1 else s for s in shape),
                "rank": None,
            }[unknown]
        inputs.append(g.input(f"x{number}", _dtype_of(record, port, dtype), dims))
    g.add_op(record.kind, *inputs, name="y", outputs=call.outputs, **call.attrs)
    return g.finalize()


def _dtype_of(record: OpDef, port: Port, dtype: str) -> str:
    """The dtype of an input if the first one has `dtype`; inputs that cannot have it use their own first dtype."""
    allowed = record.types.get(port.type, (port.type,))
    return dtype if dtype in allowed else "f64" if dtype == "f64" and "f64" in allowed else allowed[0]


def arrays_of(call: Call, dtype: str, record: OpDef | None = None, seed: int = 0) -> list[np.ndarray]:
    """Arrays with ties, zeros and numbers of either sign, exact in every dtype; products of them stay small.

    Args:
        record: the op for their dtypes and domain, if the inputs differ in them.
    """
    rng = np.random.default_rng(seed)
    made = []
    ports = (None,) * len(call.shapes) if record is None else record.with_optional(len(call.shapes))
    for index, (port, shape) in enumerate(zip(ports, call.shapes, strict=True)):
        if index in call.given:
            made.append(np.array(call.given[index], np.int32))
            continue
        name = dtype if record is None or port is None else _dtype_of(record, port, dtype)
        target = dtypes.get(name)
        low, high = (0 if name in ("u8", "boolean") else -4), 4
        step = 2
        if record is not None and len(record.domain) > 1:
            step = 8
            low, high = (int(bound * step) for bound in record.domain[index])
        steps = np.asarray(rng.integers(low, high + 1, shape))
        made.append(np.asarray(steps / step if target.is_float else steps).astype(target.numpy))
    return made


def reference_of(record: OpDef, call: Call, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of the record's reference: one for each output of the call."""
    assert record.reference is not None
    made = record.reference(*arrays, **call.attrs)
    return list(made[: call.outputs]) if record.returns_several else [made]


def listed(results: Any) -> list[np.ndarray]:
    """Results of a graph as a list, whether it has one output or several."""
    return list(results.values()) if isinstance(results, dict) else [results]


def feeds(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by the names of `graph_of`."""
    return {f"x{i}": a for i, a in enumerate(arrays)}


def spelled(graph: og.Graph) -> og.Graph:
    """A graph of one op with the op spelled out; outputs have the names y0, y1, ..."""
    (op,) = graph.ops
    builder = GraphBuilder(graph)
    for tensor in graph.inputs:
        builder.input(tensor)
    speller = opdef.get(op.kind, where=op.label).spelled
    assert speller is not None
    made = speller(builder, op)
    assert [t.dtype for t in made] == [t.dtype for t in op.outputs]
    for tensor, wanted in zip(made, op.outputs, strict=True):
        if graph.inputs[0].has_known_shape:
            assert tensor.dims == wanted.dims
    return builder.finish({f"y{i}": t for i, t in enumerate(made)})
