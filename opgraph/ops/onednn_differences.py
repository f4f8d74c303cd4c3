"""The intended differences between the records and oneDNN's schemas, each with its reason, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from opgraph.ir import dtypes
from opgraph.ir.op import Op


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference of a kind, in words."""

    kind: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Differences with one reason.

    Attributes:
        kinds, what: patterns (`*` matches any text).
        is_onednn: oneDNN has it, and only the schema file leaves it out.
        used_by: tests if an op uses it, so that oneDNN rejects the op; given where `what` is not enough for the test.
    """

    reason: str
    kinds: tuple[str, ...]
    what: tuple[str, ...]
    is_onednn: bool = False
    used_by: Callable[[Op], bool] | None = None

    def names(self, found: Difference, kind: str, what: str) -> bool:
        """True if one pattern of `kinds` and one of `what` match a difference."""
        return fnmatchcase(found.kind, kind) and fnmatchcase(found.what, what)

    def covers(self, found: Difference) -> bool:
        """True if any of the patterns match a difference."""
        return any(self.names(found, kind, what) for kind in self.kinds for what in self.what)

    def row(self) -> list[str]:
        """The table row of kinds, differences and reason; dtypes of one port are in one list."""
        dtypes_of: dict[str, list[str]] = {}
        others = []
        for what in self.what:
            port, _, dtype = what.partition(" may be ")
            if dtype in dtypes.BY_NAME:
                dtypes_of.setdefault(port, []).append(dtype)
            else:
                others.append(what)
        ports: dict[tuple[str, ...], list[str]] = {}
        for port, names in dtypes_of.items():
            ports.setdefault(tuple(names), []).append("every port of floats" if port == "*" else port)
        said = [f"{', '.join(p)} may be {', '.join(names)}" for names, p in ports.items()]
        kinds = "all" if self.kinds == ("*",) else ", ".join(self.kinds)
        return [kinds, "; ".join([*said, *others]), self.reason]


_REDUCTIONS = tuple(f"Reduce{n}" for n in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum"))
_INTEGERS = ("s64", "s32", "s8", "u8")

DIFFERENCES: tuple[Listed, ...] = (
    Listed(
        reason="float64 is the truth that results are measured against, so every op of floats takes it",
        kinds=("*",),
        what=("* may be f64",),
    ),
    Listed(
        reason="ONNX and torch compute with integers, which are exact here: what does not fit wraps modulo 2^width",
        kinds=("Divide", "Maximum", "Minimum", "Multiply", "SquaredDifference"),
        what=tuple(f"{port} may be {d}" for port in ("src_0", "src_1", "dst") for d in _INTEGERS),
    ),
    Listed(
        reason="as for Divide: s32 is oneDNN's own here, the other integers are ONNX's and torch's",
        kinds=("Add", "Subtract"),
        what=tuple(f"{port} may be {d}" for port in ("src_0", "src_1", "dst") for d in ("s64", "s8", "u8")),
    ),
    Listed(
        reason="integers compare exactly, and ONNX and torch compare them",
        kinds=("GreaterEqual",),
        what=tuple(f"{port} may be {d}" for port in ("src_0", "src_1") for d in ("s64", "s8", "u8")),
    ),
    Listed(
        reason="what only chooses between values takes every dtype that has arithmetic",
        kinds=("Select",),
        what=tuple(f"{port} may be {d}" for port in ("src_0", "src_1", "dst") for d in (*_INTEGERS, "boolean")),
    ),
    Listed(
        reason="defined for integers too, in ONNX or in torch",
        kinds=("Abs", "Clamp", "Pow", "ReLU", "Square"),
        what=tuple(f"{port} may be {d}" for port in ("src", "dst") for d in _INTEGERS),
    ),
    Listed(
        reason="what only moves values takes every dtype that has arithmetic",
        kinds=("Concat", "StaticReshape", "StaticTranspose", "TypeCast"),
        what=tuple(f"{port} may be {d}" for port in ("src", "dst") for d in (*_INTEGERS, "boolean")),
    ),
    Listed(
        reason="only the shape of src counts, whatever its dtype",
        kinds=("GenIndex",),
        what=tuple(f"src may be {d}" for d in (*_INTEGERS, "boolean")),
    ),
    Listed(
        reason="every value of a graph may be an output, whatever its dtype",
        kinds=("End",),
        what=tuple(f"src may be {d}" for d in ("s64", "boolean", "f8_e4m3", "f8_e5m2", "s4", "u4")),
    ),
    Listed(
        reason="converting a dtype to itself changes nothing, and bf16 to f16 rounds once: neither has to be refused",
        kinds=("TypeCast",),
        what=("check_typecast_data_type is not demanded",),
        used_by=lambda op: "f32" not in (a := op.inputs[0].dtype, b := op.outputs[0].dtype) or a == b,
    ),
    Listed(
        reason="the factor that oneDNN's design of swish names as its first way on; 1 by default",
        kinds=("Sigmoid", "SigmoidBackward"),
        what=("has attribute alpha",),
    ),
    Listed(
        reason="ONNX's Clip takes its bounds as tensors, and either may be absent",
        kinds=("Clamp",),
        what=("has input low", "has input high", "attribute min is not required", "attribute max is not required"),
    ),
    Listed(
        reason="ONNX's Pow takes its exponent as a tensor; exactly one of the two ways is demanded",
        kinds=("Pow",),
        what=("has input exponent", "attribute beta is not required"),
    ),
    Listed(
        reason="without axes as an attribute or an input oneDNN's op is an identity, which nobody means: refused",
        kinds=_REDUCTIONS,
        what=("attribute axes is None by default, not ()",),
    ),
    Listed(
        reason="one port stands for src_0, src_1 and so on; ONNX joins any number. That there is one is checked",
        kinds=("Concat",),
        what=(
            "input 0 is called src, not src_i",
            "takes 0 inputs or more, not 1",
            "takes any number of inputs, not 64",
        ),
    ),
    Listed(
        reason="swapping the branches of a Select without negating its condition gives another result",
        kinds=("Select",),
        what=("is not commutative",),
    ),
    Listed(
        reason="the schema file is cut off before these two; oneDNN's pages and its graph files have them",
        is_onednn=True,
        kinds=("Quantize", "Dequantize"),
        what=("has attribute qtype", "has attribute zps"),
    ),
    Listed(
        reason="the schema file leaves it out; oneDNN's pages and its graph files have it",
        is_onednn=True,
        kinds=("DynamicQuantize", "DynamicDequantize"),
        what=("has attribute qtype",),
    ),
    Listed(
        reason="oneDNN takes every other text for floor; a misspelt ceil is refused",
        kinds=("AvgPool", "MaxPool"),
        what=("attribute rounding_type may be floor or ceil",),
    ),
    Listed(
        reason="where no shape is given it is the smallest one, as output_padding says; oneDNN's default list of zeros "
        "keeps this check from ever refusing anything",
        kinds=("AvgPoolBackward",),
        what=("check_avgpool_bwd_input_shape is not demanded",),
    ),
    Listed(
        reason="as for AvgPoolBackward",
        kinds=("ConvolutionBackwardData",),
        what=("check_conv_bwd_data_output_shape is not demanded",),
    ),
)

#: Differences that no schema shows.
UNSEEN: tuple[Listed, ...] = (
    Listed(
        reason="each channel is a group then, however many there are: ai.onnx InstanceNormalization",
        kinds=("GroupNorm",),
        what=("attribute groups may be 0",),
        used_by=lambda op: op.attrs.get("groups") == 0,
    ),
    Listed(
        reason="oneDNN's takes none; here they keep the node of an ONNX model",
        kinds=("Wildcard",),
        what=("may have attributes",),
        used_by=lambda op: bool(op.attrs),
    ),
)
