"""oneDNN's 88 schemas against the records: every difference is found, and listed with its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import opgraph as og
from opgraph import errors
from opgraph.ir import opdef
from opgraph.ir.opdef import Attr, OpDef, Port
from opgraph.ops.onednn_differences import DIFFERENCES, Difference

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "onednn-opschema.json"
if not SHARED.exists():
    pytest.skip("oneDNN's schema file is not here: ../shared/data/onednn-opschema.json", allow_module_level=True)
SCHEMAS: list[dict[str, Any]] = json.loads(SHARED.read_text())
NAMES = {"f": "f32", "i": "s64", "b": "bool", "s": "string", "fs": "f32[]", "is": "s64[]"}


def record_of(schema: dict[str, Any]) -> OpDef:
    found = opdef.find(schema["kind"])
    assert found is not None, f"{schema['kind']} has no record"
    return found


# -- finding ----------------------------------------------------------------------------------------------------------


def differences(schema: dict[str, Any]) -> Iterator[Difference]:
    """All differences between a record and oneDNN's schema."""
    record = record_of(schema)
    yield from ports(schema, "inputs", record.inputs, record)
    yield from ports(schema, "outputs", record.outputs, record)
    yield from attributes(schema, record)
    for name in schema["constraints"]:
        lines = [line.replace("{kind}", record.kind) for line in REFUSED[name].get(record.kind) or REFUSED[name][""]]
        if not all(is_refused(line, SAYS[name]) for line in lines):
            yield Difference(record.kind, f"{name} is not demanded")
    if bool(schema["commutative"]) != record.commutative:
        yield Difference(record.kind, f"is {'' if record.commutative else 'not '}commutative")


def ports(schema: dict[str, Any], what: str, own: tuple[Port, ...], record: OpDef) -> Iterator[Difference]:
    theirs = schema[what]
    for place, (mine, other) in enumerate(zip(own, theirs, strict=False)):
        if mine.name != other["name"]:
            yield Difference(record.kind, f"{what[:-1]} {place} is called {mine.name}, not {other['name']}")
        have = set(record.types.get(mine.type, (mine.type,)))
        wanted = set(re.split(r"[, ]+", schema["types"].get(other["type"], other["type"])))
        for name in sorted(have - wanted) if wanted != {"any"} else ():
            yield Difference(record.kind, f"{mine.name} may be {name}")
        for name in sorted(wanted - have - {"any"}):
            yield Difference(record.kind, f"{mine.name} may not be {name}")
    for port in own[len(theirs) :]:
        yield Difference(record.kind, f"has {what[:-1]} {port.name}")
    for missing in theirs[len(own) :]:
        yield Difference(record.kind, f"lacks {what[:-1]} {missing['name']}")
    yield from one_dtype(schema, what, own, record)
    counts = [int(n) for n in re.findall(r"\d+", schema[f"num_{what}"] or "")]
    least = sum(not (p.optional or p.variadic) for p in own[: len(theirs)])
    most = None if own and own[-1].variadic else min(len(own), len(theirs))
    if counts and least != min(counts):
        yield Difference(record.kind, f"takes {least} {what} or more, not {min(counts)}")
    if counts and most != max(counts):
        yield Difference(record.kind, f"takes {'any number of' if most is None else most} {what}, not {max(counts)}")


def one_dtype(schema: dict[str, Any], what: str, own: tuple[Port, ...], record: OpDef) -> Iterator[Difference]:
    """Ports that must have one dtype in oneDNN and not here, or vice versa."""
    first = [(p["name"], p["type"]) for p in (*schema["inputs"], *schema["outputs"])]
    mine = {p.name: p.type for p in (*record.inputs, *record.outputs)}
    for i, (a, x) in enumerate(first if what == "inputs" else []):
        for b, y in first[:i]:
            if (
                a in mine
                and b in mine
                and (x == y) != (mine[a] == mine[b])
                and len(schema["types"].get(x, "").split(",")) > 1
            ):
                yield Difference(record.kind, f"{a} and {b} {'may differ' if x == y else 'have one dtype'}")


def attributes(schema: dict[str, Any], record: OpDef) -> Iterator[Difference]:
    own = {a.name: a for a in record.attrs}
    for name, need, type_, text in schema["attributes"]:
        attr = own.pop(name, None)
        if attr is None:
            yield Difference(record.kind, f"lacks attribute {name}")
            continue
        if attr.type != NAMES[type_]:
            yield Difference(record.kind, f"attribute {name} is {attr.type}, not {NAMES[type_]}")
        if attr.required != (need == "req"):
            yield Difference(record.kind, f"attribute {name} is {'' if attr.required else 'not '}required")
        if "//" in text:  # the text after it was cut off with a comment
            continue
        default, choices = stated(text, attr)
        if default != attr.default:
            yield Difference(record.kind, f"attribute {name} is {attr.default} by default, not {default}")
        if set(choices) != set(attr.choices):
            yield Difference(record.kind, f"attribute {name} may be {' or '.join(attr.choices) or 'anything'}")
    for name in own:
        yield Difference(record.kind, f"has attribute {name}")


def stated(text: str, attr: Attr) -> tuple[Any, list[str]]:
    """The default and the choices, read from the C++ source text."""
    words = re.findall(r'"([^"]*)"', text)
    if attr.type == "string":
        in_braces = "{" in text
        return (words[0] if words and not text.startswith("{") else None), (
            words[1:] if not text.startswith("{") else words
        ) if in_braces else []
    if vector := re.search(r"std::vector<int64_t>\((?:DNNL_MAX_NDIMS, (\d))?\)", text):
        return (int(vector[1]),) * 12 if vector[1] else (), []
    if attr.type == "bool":
        return {"true": True, "false": False, "": None}[text.strip()], []
    number = re.search(r"-?\d+(?:\.\d*)?(?:e-?\d+)?", text.replace("int64_t", ""))
    return None if number is None else float(number[0]) if attr.type == "f32" else int(number[0]), []


# -- constraints: calls that each of them refuses ---------------------------------------------------------------------

PADS = 'strides=[1], pads_begin=[-1], pads_end=[0], {}data_format="NCX"'
_CONV = PADS.format("dilations=[1], ")
_FITTING = _CONV.replace("-1", "0")
_POOL = PADS.format("kernel=[2], ")
#: constraint -> kind ("": any) -> lines that it refuses.
REFUSED: dict[str, dict[str, list[str]]] = {
    "check_pads": {
        "Convolution": [f'Convolution(c, w, {_CONV}, weights_format="OIX")'],
        "ConvolutionBackwardData": [f'ConvolutionBackwardData(c, w, {_CONV}, weights_format="OIX")'],
        "ConvolutionBackwardWeights": [
            f'ConvolutionBackwardWeights(c, c3, {_CONV}, weights_format="OIX", weights_shape=[3, 3, 2])'
        ],
        "ConvTranspose": [f'ConvTranspose(c, w, {_CONV}, weights_format="IOX")'],
        "ConvTransposeBackwardData": [f'ConvTransposeBackwardData(c, w, {_CONV}, weights_format="IOX")'],
        "ConvTransposeBackwardWeights": [
            f'ConvTransposeBackwardWeights(c3, c, {_CONV}, weights_format="IOX", weights_shape=[3, 3, 2])'
        ],
        "AvgPool": [f"AvgPool(c, {_POOL}, exclude_pad=true)"],
        "MaxPool": [f"MaxPool(c, {_POOL})"],
        "AvgPoolBackward": [f"AvgPoolBackward(c, {_POOL}, exclude_pad=true)"],
        "MaxPoolBackward": [f"MaxPoolBackward(c, c3, {_POOL})"],
    },
    "check_maxpool_dilations": {
        kind: [f"{kind}({given}, strides=[1], pads_begin=[0], pads_end=[0], kernel=[2], dilations=[1, 1])"]
        for kind, given in (("MaxPool", "c"), ("MaxPoolBackward", "c, c"))
    },
    "check_bn_data_type": {
        "BatchNormInference": ["BatchNormInference(c, b5, b5, b5, b5, epsilon=0.1)"],
        "BatchNormForwardTraining": ["BatchNormForwardTraining(c, b5, b5, epsilon=0.1) as 5 outputs"],
        "BatchNormTrainingBackward": ["BatchNormTrainingBackward(c, c, b5, b5, epsilon=0.1)"],
    },
    "check_norm_data_type": {
        "LayerNorm": ["LayerNorm(c, b5, b5, keep_stats=false)"],
        "GroupNorm": ["GroupNorm(c, b5, b5, groups=1, keep_stats=false)"],
        "RMSNorm": ["RMSNorm(c, b5)"],
        "LayerNormBackward": ["LayerNormBackward(c, c, b23, b23, use_affine=false)"],
    },
    "check_ln_gn_fwd_outputs_num": {
        "LayerNorm": ["LayerNorm(c, use_affine=false)", "LayerNorm(c, f5, f5)", "LayerNorm(c, f5, keep_stats=false)"],
        "GroupNorm": ["GroupNorm(c, groups=1, use_affine=false)", "GroupNorm(c, f5, groups=1, keep_stats=false)"],
    },
    "check_ln_bwd_use_affine": {"LayerNormBackward": ["LayerNormBackward(c, c, f23, f23, f5)"]},
    "check_matmul_dtype": {"MatMul": ["MatMul(h, h) as f32 to bf16"]},
    "check_softmax_dtype": {"SoftMax": ["SoftMax(h) as bf16"]},
    "check_softmax_bwd_output_dtype": {"SoftMaxBackward": ["SoftMaxBackward(h, h) as bf16"]},
    "check_reduce_axes": {"": ["{kind}(c)", "{kind}(c, i, axes=[0])"]},
    "check_quant_dequant_scales_zps": {
        "Quantize": [
            "Quantize(c, scales=[1.0, 2.0]) as s8",
            "Quantize(c, scales=[1.0], zps=[1, 2]) as s8",
            "Quantize(c, scales=[1.0], zps=[1]) as f8_e4m3",
        ],
        "Dequantize": ["Dequantize(q, scales=[1.0, 2.0])", "Dequantize(q, scales=[1.0], zps=[1, 2])"],
    },
    "check_dyn_quant_dequant_scales_zps": {
        "DynamicQuantize": ["DynamicQuantize(c, f5) as s8", 'DynamicQuantize(c, f5, qtype="per_channel") as s8'],
        "DynamicDequantize": ["DynamicDequantize(q, f5)", 'DynamicDequantize(q, f5, qtype="per_group")'],
    },
    "check_typecast_data_type": {"TypeCast": ["TypeCast(c) as f32", "TypeCast(h) as bf16"]},
    "check_interpolate_sizes_scales": {
        "Interpolate": ['Interpolate(c, mode="nearest")', 'Interpolate(c, mode="nearest", sizes=[2], scales=[1.0])'],
        "InterpolateBackward": ['InterpolateBackward(c, c, mode="nearest")'],
    },
    "check_avgpool_bwd_input_shape": {
        "AvgPoolBackward": [
            "AvgPoolBackward(c, strides=[1], pads_begin=[0], pads_end=[0], kernel=[2], exclude_pad=true)"
        ]
    },
    "check_conv_bwd_data_output_shape": {
        "ConvolutionBackwardData": [f'ConvolutionBackwardData(c, w, {_FITTING}, weights_format="OIX")']
    },
    "check_conv_bwd_weights_weights_shape": {
        kind: [f'{kind}(c, c, {_FITTING}, weights_format="{w}")']
        for kind, w in (("ConvolutionBackwardWeights", "OIX"), ("ConvTransposeBackwardWeights", "IOX"))
    },
}
#: A part of each refusal's message, to make sure that the refusal is the right one.
SAYS = {
    "check_pads": "pads_begin",
    "check_maxpool_dilations": "dilations",
    "check_bn_data_type": "of f32 does not take bf16",
    "check_norm_data_type": "of f32 does not take bf16",
    "check_ln_gn_fwd_outputs_num": "keep_stats=True got|of gamma and beta",
    "check_ln_bwd_use_affine": "use_affine=True got 5 inputs and 1 outputs",
    "check_matmul_dtype": "does not make",
    "check_softmax_dtype": "does not make",
    "check_softmax_bwd_output_dtype": "does not make",
    "check_reduce_axes": "axes (twice|nowhere)",
    "check_quant_dequant_scales_zps": "scales for|zps for|zero points",
    "check_dyn_quant_dequant_scales_zps": "scales are|group_shape",
    "check_typecast_data_type": "dtype",
    "check_interpolate_sizes_scales": "of the attributes sizes and scales",
    "check_avgpool_bwd_input_shape": "src_shape",
    "check_conv_bwd_data_output_shape": "dst_shape",
    "check_conv_bwd_weights_weights_shape": "how large the weights are",
}
INPUTS = (
    "c: f32[2,3,5], w: f32[3,3,2], h: f16[5,5], q: s8[2,3,5], i: s32[1], f5: f32[5], b5: bf16[5], f23: f32[2,3], "
    "b23: bf16[2,3], c3: f32[2,3,3]"
)


def is_refused(line: str, says: str) -> bool:
    call, _, result = line.partition(" as ")
    declared = ", a, b, d, e" if "outputs" in result else f": {result.split(' to ')[-1]}[*]" if result else ""
    try:
        og.parse(f"graph({INPUTS}) -> (y)\n  y{declared} = {call}")
    except errors.InvalidArguments as error:  # a line that cannot be parsed tests no refusal
        raise AssertionError(f"{line}: {error}") from None
    except errors.OpGraphError as error:
        assert re.search(says, error.what), f"{line}: {error}"
        return True
    return False


# -- the comparison ---------------------------------------------------------------------------------------------------


def test_each_of_the_88_schemas_has_a_record() -> None:
    assert len(SCHEMAS) == 88
    for schema in SCHEMAS:
        record_of(schema)


def test_every_schema_constraint_has_refused_examples() -> None:
    wanted = {
        name: {s["kind"] for s in SCHEMAS if name in s["constraints"]} for s in SCHEMAS for name in s["constraints"]
    }
    assert wanted.keys() == REFUSED.keys()
    for name, kinds in wanted.items():
        assert "" in REFUSED[name] or REFUSED[name].keys() == kinds, name


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: s["kind"])
def test_every_schema_difference_is_listed_with_a_reason(schema: dict[str, Any]) -> None:
    found = {d for d in differences(schema) if not any(listed.covers(d) for listed in DIFFERENCES)}
    assert not found, "\n".join(sorted(f"{d.kind}: {d.what}" for d in found))


def test_every_listed_schema_difference_exists() -> None:
    found = [d for schema in SCHEMAS for d in differences(schema)]
    for listed in DIFFERENCES:
        for kind in listed.kinds:
            for what in listed.what:
                assert any(listed.covers(d) for d in found if listed.names(d, kind, what)), f"{kind}: {what} is none"
        assert len(listed.reason) > 20
