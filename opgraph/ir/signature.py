"""What an op's record is made of: attributes, ports, how rows are reduced, ONNX and torch forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opgraph.ir.op import AttrValue

_PYTHON_TYPES: dict[str, type] = {
    "f32": float,
    "s64": int,
    "bool": bool,
    "string": str,
    "f32[]": tuple,
    "s64[]": tuple,
    "string[]": tuple,
}
ATTR_TYPES = tuple(_PYTHON_TYPES)
#: A value that an attribute of each type may have, for examples.
_NEUTRAL: dict[str, AttrValue] = {"f32": 1.0, "s64": 0, "bool": False, "string": "", "f32[]": (), "s64[]": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attr:
    """One attribute: oneDNN's name, type and default. Without a default it is required."""

    name: str
    type: str
    default: AttrValue | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False

    def __post_init__(self) -> None:
        if self.type not in ATTR_TYPES:
            raise ValueError(f"attribute {self.name}: unknown type {self.type!r}")
        if self.choices and self.default is not None and self.default not in self.choices:
            raise ValueError(f"attribute {self.name}: default {self.default!r} is not a choice")
        if self.default is not None and not isinstance(self.default, _PYTHON_TYPES[self.type]):
            raise ValueError(f"attribute {self.name}: default {self.default!r} is not {self.type}")
        if self.type != "bool" and isinstance(self.default, bool):
            raise ValueError(f"attribute {self.name}: default {self.default!r} is not {self.type}")

    @property
    def required(self) -> bool:
        """Whether an op must set it."""
        return self.default is None and not self.optional

    @property
    def example(self) -> AttrValue:
        """A value that it may have: the default, if there is one."""
        if self.default is not None:
            return self.default
        return self.choices[0] if self.choices else _NEUTRAL[self.type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output.

    Attributes:
        type: its dtype: a symbol of the op's `types`, or a dtype name.
        optional, variadic: whether it may be left out, or given any number of times.
        shape_only: only the shape of this input counts; its data is never read.
        says_shape: the shape rule of the op reads the data of this input; before they are at hand it leaves sizes open.
        wide: where nothing else says the dtype of this output, it is the one that inputs are computed in: f64 for f64,
            else f32.
    """

    name: str
    type: str = "T"
    optional: bool = False
    variadic: bool = False
    shape_only: bool = False
    says_shape: bool = False
    wide: bool = False


def port_names(ports: Sequence[Port], count: int) -> list[str]:
    """Names of `count` given inputs, each its own: those of a variadic port are numbered."""
    if ports and ports[-1].variadic:
        fixed = [p.name for p in ports[:-1]]
        return [*fixed, *[f"{ports[-1].name}_{i}" for i in range(count - len(fixed))]]
    return [p.name for p in ports[:count]]


def ports_of(ports: tuple[Port, ...], count: int) -> tuple[Port, ...]:
    """The ports that `count` given inputs stand for (variadic ports repeated)."""
    if ports and ports[-1].variadic:
        return (*ports[:-1], *[ports[-1]] * (count - len(ports) + 1))
    return ports[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How a generated kernel reduces a row.

    Attributes:
        how: what becomes of the elements: "add", "multiply", "largest" or "smallest".
        each: C++ for what an element contributes, over `{src}`, in the compute type.
        total: C++ for the result over `{total}` and `{count}`, the number of elements, in double.
    """

    how: str
    each: str = "{src}"
    total: str = "{total}"

    @property
    def is_sum(self) -> bool:
        """Whether it adds up the elements as they are, and perhaps divides by their number."""
        return self.how == "add" and self.each == "{src}"

    @property
    def is_mean(self) -> bool:
        """Whether it divides by the number of elements."""
        return "{count}" in self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Onnx:
    """The ai.onnx form of an op: one node.

    Attributes:
        op_type: ONNX's name.
        since, until: first and last opset whose definition of the op has this form; until is None for the newest.
            Which dtypes an opset allows is not repeated here: `onnx.defs` says.
        attrs: our attribute name -> ONNX's. Ours of type bool are ONNX ints 0 and 1. One that ONNX leaves out has
            ONNX's default, which may differ from ours.
        joined: ONNX's attribute name -> those of ours that it is made of, lists of one length one after the other.
        implied: ONNX attributes that only repeat what shapes say: not written, and not looked at.
        fixed: ONNX attributes that the node must have for it to mean our op, e.g. Gelu's approximate.
        when: our attributes that must have these values for the form to apply; on import, the node sets them.
        inputs: what stands at each ONNX input: one of our inputs, "$attr" for a scalar constant of the first input's
            dtype with that attribute's value (of an attribute that is a list of ints: for a 1-d s64 constant),
            "input|$attr" for whichever is given, or "@input" for the shape of that input, which a node Shape makes; an
            absent optional one is left empty. The form applies only to an op whose inputs are all listed. None: our
            inputs, in order.
        dtypes: dtypes of the first input for which alone the form applies, where that depends on attributes and so
            `onnx.defs` cannot say it.
        scalars: our inputs that must have no dimensions.
        applies: whether ONNX takes these attributes, for inputs (by name) of so many dimensions (None: unknown).
        note: where the two differ in corner cases.
    """

    op_type: str
    since: int
    until: int | None = None
    attrs: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    implied: tuple[str, ...] = ()
    fixed: Mapping[str, AttrValue] = field(default_factory=dict)
    when: Mapping[str, AttrValue] = field(default_factory=dict)
    inputs: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    scalars: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, Any], Mapping[str, int | None]], bool] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A torch function that means an op, or a small composition of ops.

    Attributes:
        signature: "name(parameter, parameter=default)" as torch spells it; "a|b(...)" for several names of one
            function. A name stands for the function, the method and the in-place variants with a trailing underscore,
            wherever torch has them; "Tensor.name" for the method alone.
        form: what it means, in the notation of `opgraph.ir.expression`: a parameter's name is its value, `$name` a
            number (a scalar constant, or an attribute's value). Or a function of the values of the parameters, with
            the dtype that torch computes in as "dtype" and its version as "torch", that returns such a text ("" where
            opgraph has none). None: the op itself, its inputs and attributes in the order of the parameters.
        exact: the same without float attributes, for numbers that an attribute (f32) does not hold in f64.
        keeps_integers: integers come out as they went in, whatever the form says (floor, round ...).
        widens: whether, for these values of the parameters, f16 and bf16 are cast to f32 and the result back: torch's
            derivative is not by the rounded result, from which that of the ops here follows.
        rounds_numbers: torch's CPU kernels round a number that meets f16 or bf16 to these; elsewhere it is an f32.
        finite: parameters that are finite numbers, or not given; what it means for others opgraph does not compute.
    """

    signature: str
    form: str | Callable[[Mapping[str, Any]], str] | None = None
    exact: str | Callable[[Mapping[str, Any]], str] | None = None
    keeps_integers: bool = False
    widens: Callable[[Mapping[str, Any]], bool] = lambda values: False
    rounds_numbers: bool = False
    finite: tuple[str, ...] = ()
