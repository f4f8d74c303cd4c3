"""The parts of an op's record: attributes, ports, row reductions, ONNX and torch forms."""

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
#: An example value for attributes of each type.
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
        """True if an op must set it."""
        return self.default is None and not self.optional

    @property
    def example(self) -> AttrValue:
        """A valid value: the default, if there is one."""
        if self.default is not None:
            return self.default
        return self.choices[0] if self.choices else _NEUTRAL[self.type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output.

    Attributes:
        type: its dtype: a symbol of the op's `types`, or a dtype name.
        optional, variadic: it may be omitted, or given any number of times.
        shape_only: only the shape of this input counts; its data is never read.
        says_shape: the shape rule of the op reads the data of this input; sizes are unknown until it is available.
        wide: if nothing else determines the dtype of this output, it is the compute dtype of the inputs: f64 for f64,
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
    """Distinct names of `count` given inputs: those of a variadic port are numbered."""
    if ports and ports[-1].variadic:
        fixed = [p.name for p in ports[:-1]]
        return [*fixed, *[f"{ports[-1].name}_{i}" for i in range(count - len(fixed))]]
    return [p.name for p in ports[:count]]


def ports_of(ports: tuple[Port, ...], count: int) -> tuple[Port, ...]:
    """The ports of `count` given inputs (variadic ports repeated)."""
    if ports and ports[-1].variadic:
        return (*ports[:-1], *[ports[-1]] * (count - len(ports) + 1))
    return ports[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The reduction of a row in a generated kernel.

    Attributes:
        how: the reduction: "add", "multiply", "largest" or "smallest".
        each: C++ for the contribution of one element, over `{src}`, in the compute type.
        total: C++ for the result, over `{total}` and `{count}` (the number of elements), in double.
    """

    how: str
    each: str = "{src}"
    total: str = "{total}"

    @property
    def is_sum(self) -> bool:
        """True if it adds up the unchanged elements, and perhaps divides by their number."""
        return self.how == "add" and self.each == "{src}"

    @property
    def is_mean(self) -> bool:
        """True if it divides by the number of elements."""
        return "{count}" in self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Onnx:
    """The ai.onnx form of an op: one node.

    Attributes:
        op_type: ONNX's name.
        since, until: first and last opset whose definition of the op has this form; until is None for the newest.
            The dtypes that an opset allows are not repeated here: they are in `onnx.defs`.
        attrs: our attribute name -> ONNX's. Our bool attributes are ONNX ints 0 and 1. An attribute that an ONNX node
            omits has ONNX's default, which may differ from ours.
        joined: ONNX's attribute name -> our attributes that it concatenates, which are lists of equal length.
        implied: ONNX attributes that only repeat information of the shapes: not written on export, ignored on import.
        fixed: ONNX attributes that the node must have in order to mean our op, e.g. Gelu's approximate.
        when: our attributes that must have these values for the form to apply; on import, the node sets them.
        inputs: the source of each ONNX input: one of our inputs; "$attr" for a scalar constant of the first input's
            dtype with that attribute's value (a 1-d s64 constant for a list of ints); "input|$attr" for the one of both
            that is given; or "@input" for the shape of that input, made by a Shape node. An absent optional input is
            left empty. The form applies only to an op whose inputs are all listed. None: our inputs, in order.
        dtypes: the form applies only to these dtypes of the first input; for restrictions that depend on attributes,
            which `onnx.defs` cannot express.
        scalars: our inputs that must have no dimensions.
        applies: returns True if ONNX supports these attributes for inputs (by name) with these numbers of dimensions
            (None: unknown).
        note: differences between the two in corner cases.
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
        signature: "name(parameter, parameter=default)" in torch's spelling; "a|b(...)" for several names of one
            function. A name stands for the function, the method and the in-place variants with a trailing underscore,
            wherever torch has them; "Tensor.name" stands for the method alone.
        form: the equivalent ops, in the notation of `opgraph.ir.expression`: a parameter's name is its value, `$name` a
            number (a scalar constant, or an attribute's value). Or a function that returns such a text ("" if opgraph
            has no equivalent) from the values of the parameters, torch's compute dtype as "dtype" and torch's version
            as "torch". None: the op itself, with its inputs and attributes in the order of the parameters.
        exact: the same form without float attributes; used in f64 for numbers that an f32 attribute does not hold.
        keeps_integers: integers are returned unchanged, whatever the form is (floor, round ...).
        widens: returns True if, for these values of the parameters, f16 and bf16 are cast to f32 and the result is cast
            back: torch's derivative does not use the rounded result, but that of the ops here would.
        rounds_numbers: torch's CPU kernels round a number next to an f16 or bf16 operand to that dtype; on other
            devices it is an f32.
        finite: parameters that must be finite numbers, or omitted; opgraph does not support other values.
    """

    signature: str
    form: str | Callable[[Mapping[str, Any]], str] | None = None
    exact: str | Callable[[Mapping[str, Any]], str] | None = None
    keeps_integers: bool = False
    widens: Callable[[Mapping[str, Any]], bool] = lambda values: False
    rounds_numbers: bool = False
    finite: tuple[str, ...] = ()
