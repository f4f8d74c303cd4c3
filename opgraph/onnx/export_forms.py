"""The table of export forms: the form of a named unit where it is better than the unit's spelling.

Times in ms, measured in onnxruntime 1.31 on the CPU with 400,000 elements and one thread, the spelling first (in 1.32
the same forms win, by the same factors):

    GELU, erf       f32   0.41 as 0.5x + 0.5x erf(...), which onnxruntime does not match; 0.25 as one node
    GELU, tanh      f32   0.60 -> 0.22; it matches the spelling of one exporter only
    GELU            f16   0.57 and 0.74, also for Gelu, which has no f16 kernel: casts around the f32 kernel are faster
    Mish            f32   4.6 with Softplus and Tanh, also for ai.onnx Mish; 0.5 as x n / (n + 2), n = e^x (e^x + 2)
    HardSwish       f32   0.22 -> 0.12; f64 has no HardSigmoid
    HardSwish       f16   0.30 -> 0.20 as HardSigmoid in f32; below opset 22 the op becomes eleven nodes and takes 2.4
    SoftPlus        f32   kept: log(1 + e^x) takes 0.81, the op Softplus 4.4
    Sigmoid         f32   four nodes -> one; f64 is kept: the division is faster there than the op

bf16 has no pointwise kernels at all: only a function that computes in f32 runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from opgraph.ir import dtypes
from opgraph.ir.op import AttrValue

PLAIN, FUNCTION, CONTRIB = "plain", "function", "contrib"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One row of the table: the form of a kind in these dtypes.

    Attributes:
        when: attribute values to which the row applies.
        since, until: opsets of ai.onnx to which the row applies.
        write: "plain" (a node of ai.onnx), "function" (of domain opgraph), "contrib" (of com.microsoft).
        op_type: of a contributed node.
        forms: the forms of `save` to which the row applies.
    """

    kind: str
    dtypes: tuple[str, ...]
    when: Mapping[str, AttrValue] = field(default_factory=dict)
    since: int = 13
    until: int = 1000
    write: str = PLAIN
    op_type: str = ""
    forms: tuple[str, ...] = ("auto", "function")


_STANDARD, _CONTRIB = ("standard",), ("contrib",)
_ERF, _TANH = {"mode": "gelu_erf"}, {"mode": "gelu_tanh"}
_HALVES = ("f16", "bf16")

WAYS: tuple[Way, ...] = (
    Way(kind="GELU", dtypes=("f32",), since=20),
    Way(kind="GELU", dtypes=("f32",), when=_ERF, until=19, write=CONTRIB, op_type="Gelu"),
    Way(kind="GELU", dtypes=("f32",), when=_TANH, until=19, write=CONTRIB, op_type="FastGelu"),
    Way(kind="GELU", dtypes=_HALVES, since=20, write=FUNCTION),
    Way(kind="GELU", dtypes=("f32",), when=_ERF, write=CONTRIB, op_type="Gelu", forms=_CONTRIB),
    Way(kind="GELU", dtypes=("f32",), when=_TANH, write=CONTRIB, op_type="FastGelu", forms=_CONTRIB),
    Way(kind="GELU", dtypes=dtypes.FLOATS, since=20, forms=_STANDARD),
    Way(kind="Mish", dtypes=dtypes.FLOATS, write=FUNCTION),
    Way(kind="Mish", dtypes=dtypes.FLOATS, since=18, forms=_STANDARD),
    Way(kind="HardSwish", dtypes=("f32",), since=14),
    Way(kind="HardSwish", dtypes=_HALVES, write=FUNCTION),
    Way(kind="HardSwish", dtypes=("f32", "f16"), since=14, forms=_STANDARD),
    Way(kind="SoftPlus", dtypes=("bf16",), when={"beta": 1.0}, write=FUNCTION),
    Way(kind="SoftPlus", dtypes=("f32", "f16", "f64"), when={"beta": 1.0}, forms=_STANDARD),
    Way(kind="Sigmoid", dtypes=("f32", "f16"), when={"alpha": 1.0}, forms=("auto", "function", "standard")),
    Way(kind="Sigmoid", dtypes=("bf16",), write=FUNCTION),
)


def way_out(kind: str, dtype: str, attrs: Mapping[str, AttrValue], opset: int, form: str) -> Way | None:
    """Returns the row for a unit; None if the unit keeps its spelling.

    Args:
        dtype: of its result.
        form: of `save`; "auto" if the caller chose none.
    """
    for way in WAYS:
        fits = way.kind == kind and dtype in way.dtypes and form in way.forms and way.since <= opset <= way.until
        if fits and all(attrs.get(name) == value for name, value in way.when.items()):
            return way
    return None
