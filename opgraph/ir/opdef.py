"""OpDef: everything opgraph knows about one kind of op, and the registry that holds the records.

The registry is empty here; `opgraph.ops` fills it. Nothing else in opgraph lists op names: tests, spec pages, the
command line, ONNX and torch all walk this registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from opgraph.errors import InvalidGraphOp
from opgraph.ir import dtypes
from opgraph.ir.expression import Expr, parse_expression
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import AttrValue

Attrs: TypeAlias = Mapping[str, Any]
ShapeRule: TypeAlias = Callable[[tuple[LogicalTensor, ...], Attrs], tuple[Dims, ...]]

ATTR_TYPES = ("f32", "s64", "bool", "string", "f32[]", "s64[]", "string[]")


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

    @property
    def required(self) -> bool:
        return self.default is None and not self.optional


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output: its name and its dtype, a symbol of the op's `types` or a dtype name."""

    name: str
    type: str = "T"
    optional: bool = False
    variadic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Onnx:
    """The ai.onnx form of an op: one node.

    Attributes:
        op_type: ONNX's name.
        since: first opset whose definition of the op has this form.
        attrs: our attribute name -> ONNX's.
        fixed: ONNX attributes that must have this value for the node to mean our op, e.g. Gelu's approximate.
        inputs: how many of our inputs map to ONNX inputs, in order; None = all.
    """

    op_type: str
    since: int
    attrs: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, AttrValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDef:
    """One kind of op.

    Attributes:
        kind: oneDNN's name, or ONNX's where oneDNN has none.
        doc: the formula and its corner cases, one to three sentences.
        family: "pointwise" (one output element from one element of each input) or "structural".
        inputs, outputs, attrs: the schema.
        types: dtype symbol -> dtypes it may stand for. One symbol is one dtype within an op.
        infer: output dimensions from inputs and attributes; raises ShapeMismatch.
        reference: NumPy meaning: `reference(*arrays, **attrs) -> array`. It is the definition; in float64 the truth.
        expression: C++ for one element, over input names and `$attr` names in braces:
            "og::elu({src}, {alpha})". A function of the attributes where they choose the formula.
        decomposition: the same op in smaller ones, in the notation of `opgraph.ir.expression`; how it is written to
            ONNX where ai.onnx has no such op.
        onnx: its ai.onnx forms, best first; or the reason why there is none.
        torch: `torch(torch_module, *tensors, **attrs) -> tensor`, the same meaning in torch ops; used where there is
            no compiler.
        cost: rough instructions per element, for the fusion cost model.
        commutative: whether the first two inputs may be swapped.
        domain: where tests sample the inputs, one (low, high) for all or one each.
        source: where the formula comes from.
    """

    kind: str
    doc: str
    family: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attrs: tuple[Attr, ...] = ()
    types: Mapping[str, tuple[str, ...]]
    infer: ShapeRule
    reference: Callable[..., Any] | None = None
    expression: str | Callable[[Attrs], str] | None = None
    decomposition: str | None = None
    onnx: tuple[Onnx, ...] | str = ()
    torch: Callable[..., Any] | None = None
    cost: int = 1
    commutative: bool = False
    domain: tuple[tuple[float, float], ...] = ((-4.0, 4.0),)
    source: str = ""

    def __post_init__(self) -> None:
        # Mistakes in a record fail at import, not on a user's machine.
        names = [p.name for p in (*self.inputs, *self.outputs)] + [a.name for a in self.attrs]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.kind}: a name is used twice in {names}")
        for port in (*self.inputs, *self.outputs):
            if port.type not in self.types and port.type not in dtypes.BY_NAME:
                raise ValueError(f"{self.kind}: port {port.name} has unknown type {port.type!r}")
        if self.family == "pointwise":
            for what in ("reference", "expression", "torch"):
                if getattr(self, what) is None:
                    raise ValueError(f"{self.kind}: a pointwise op needs {what}")
            if not self.onnx and self.decomposition is None:
                raise ValueError(f"{self.kind}: give its onnx form, a decomposition, or the reason why there is none")
            self.cxx({p.name: p.name for p in self.inputs}, self.default_attrs(), str)
        if self.decomposition is not None:
            parse_expression(self.decomposition)

    @property
    def is_pointwise(self) -> bool:
        return self.family == "pointwise"

    @property
    def decomposed(self) -> Expr | None:
        return None if self.decomposition is None else parse_expression(self.decomposition)

    def attr(self, name: str) -> Attr | None:
        """The attribute record of that name."""
        return next((a for a in self.attrs if a.name == name), None)

    def default_attrs(self) -> dict[str, AttrValue]:
        """Every attribute's default; a neutral value for required ones (for tests and checks of the record)."""
        neutral: dict[str, AttrValue] = {"f32": 1.0, "s64": 0, "bool": False, "string": "", "f32[]": (), "s64[]": ()}
        return {
            a.name: a.default if a.default is not None else a.choices[0] if a.choices else neutral[a.type]
            for a in self.attrs
            if not a.optional
        }

    def cxx(self, inputs: Mapping[str, str], attrs: Attrs, literal: Callable[[Any], str]) -> str:
        """The C++ expression with its inputs and attributes filled in.

        Args:
            inputs: input name -> C++ identifier. Optional inputs that are absent are left out.
            attrs: attribute values.
            literal: how a number is written, exactly, in the compute type at hand.

        Raises:
            KeyError: the expression names neither an input nor an attribute.
        """
        assert self.expression is not None
        template = self.expression if isinstance(self.expression, str) else self.expression(attrs)
        values = {name: literal(value) for name, value in attrs.items() if not isinstance(value, (str, tuple))}
        return template.format_map({**values, **inputs})

    def with_optional(self, count: int) -> tuple[Port, ...]:
        """The input ports that `count` given inputs stand for (variadic ports repeated)."""
        ports = self.inputs
        if ports and ports[-1].variadic:
            return (*ports[:-1], *[ports[-1]] * (count - len(ports) + 1))
        return ports[:count]


_REGISTRY: dict[str, OpDef] = {}


def register(opdef: OpDef) -> OpDef:
    """Adds a record; a second one of the same kind is a mistake."""
    if opdef.kind in _REGISTRY:
        raise ValueError(f"op kind {opdef.kind} is defined twice")
    _REGISTRY[opdef.kind] = opdef
    return opdef


def all_ops() -> tuple[OpDef, ...]:
    """Every record, by name."""
    return tuple(_REGISTRY[kind] for kind in sorted(_REGISTRY))


def find(kind: str) -> OpDef | None:
    """The record of a kind, or None."""
    return _REGISTRY.get(kind)


def get(kind: str, *, where: str) -> OpDef:
    """The record of a kind.

    Raises:
        InvalidGraphOp: no such kind; the message names the nearest ones.
    """
    found = _REGISTRY.get(kind)
    if found is None:
        import difflib  # only for the message

        near = difflib.get_close_matches(str(kind), _REGISTRY, n=3, cutoff=0.5)
        raise InvalidGraphOp(
            f"unknown op kind {kind!r}",
            where=where,
            fix=f"did you mean {' or '.join(near)}?" if near else "`opgraph ops` lists the kinds",
        )
    return found


def array_of(tensor: LogicalTensor) -> np.ndarray:
    """The data of a constant."""
    assert tensor.data is not None
    return tensor.data
