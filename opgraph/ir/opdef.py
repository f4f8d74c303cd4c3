"""OpDef: the complete record of one kind of op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opgraph.ir.builder import Attrs, Builder, GradientRule, ShapeRule, Speller, Template
from opgraph.ir.constants import array_of
from opgraph.ir.cxx import CxxCall, cxx_call
from opgraph.ir.expression import Call, Expr, Param, Var, parse_expression
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import AttrValue, Op
from opgraph.ir.opdef_checks import find_mistake, find_mistake_in_formulas
from opgraph.ir.registry import all_ops, find, get, of, register
from opgraph.ir.shapes import channel_axes
from opgraph.ir.signature import Attr, Onnx, Port, Row, TorchCall, port_names, ports_of

__all__ = [
    "Attr",
    "Attrs",
    "Builder",
    "GradientRule",
    "Onnx",
    "OpDef",
    "Port",
    "Row",
    "ShapeRule",
    "Speller",
    "Template",
    "TorchCall",
    "all_ops",
    "array_of",
    "find",
    "get",
    "of",
    "register",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDef:
    """One kind of op.

    Attributes:
        kind: oneDNN's name, or ONNX's if oneDNN has none.
        doc: the formula and its corner cases, one to three sentences.
        family: "pointwise" (one output element from one element of each input), "sum" (SumTo), "structural", or a
            family of library ops: "reduction", "linear", "shape", "norm", "convolution", "pooling", "resampling",
            "quantization", "parameter".
        inputs, outputs, attrs: the schema.
        types: dtype symbol -> dtypes that it may stand for. Within an op, one symbol is one dtype.
        infer: output dimensions from inputs and attributes; raises ShapeMismatch.
        reference: the NumPy implementation: `reference(*arrays, **attrs) -> array`. It defines the op; its float64
            result counts as exact. A library op with several outputs (`returns_several`) returns a tuple with one array
            for each output, used or not.
        expression: C++ for one element: one call over names of inputs and attributes in braces, such as
            "og::elu({src}, {alpha})". If attributes and given inputs determine the formula, a function of these. All
            inputs have the op's compute type (f32 for f16 and bf16), and attributes are exact literals of it, except
            with `is_cast` or `index_of`.
        decomposition: the same op in smaller ops, in the notation of `opgraph.ir.expression`; the ONNX export uses it
            if ai.onnx has no such op. A function may return "" if there is none.
        onnx: its ai.onnx forms, best first; or the reason why there is none.
        torch: `torch(torch_module, *tensors, **attrs) -> tensor`, the same op in torch; used if there is no compiler.
            A library op with several outputs returns an iterable; only the outputs that the op has are taken from it.
        cost: rough instructions per element, for the fusion cost model.
        commutative: the first two inputs may be swapped.
        domain: the range in which tests sample the inputs: one (low, high) for all inputs, or one for each.
        check: raises an OpGraphError for an op that fits the schema but is still invalid (dtypes that do not mix, a
            bound given twice); `Graph.add_op` calls it.
        channel_inputs: indices of inputs that, if they are 1-d, lie along the channel axis of the other input: axis 1
            if data_format is "NCX", the last if "NXC". `appended_axes` returns the number of axes of size 1 that follow
            them before all inputs broadcast as in NumPy. reference, torch and infer append these axes; expression, onnx
            and decomposition expect operands that are already aligned.
        powers: the op is a power or the logarithm of the first input; its expression also exists in og::positive, for a
            positive first input.
        is_cast: the op converts its input to the dtype of its output, which only the output states; expression,
            reference and torch are the identity, and their caller converts.
        by_dtype: the result depends on the dtype of the output: reference and torch take its name as the keyword `to`
            and return values of it.
        index_of: the attribute that names an axis. The expression takes the element's index along this axis instead of
            the element: the input's name stands for an s32 iota there, and the data of the input is never read.
        by_position: the expression also uses `{position}`, the row-major index of the element in the result, an s64;
            reference and torch take it as the keyword `position`, and derive it from the shapes if it is omitted.
        also: for an op with several outputs, those after the first: output name -> one op over the inputs, in the
            notation of `opgraph.ir.expression`. Each output is computed separately, and only if it is needed; common
            subexpressions are left to the compiler.
        gradient: input name -> its gradient, in the notation of `opgraph.ir.expression`. It is over the names of the
            inputs and outputs and `d`, the gradient of the (first) output, and is linear in `d`. "0" means that the
            derivative is zero everywhere; "none: " and a reason, that this input has none. If a formula does not
            suffice, a function instead of the mapping. The caller adds sums over broadcast axes and casts to the
            input's dtype. A text is the reason why no gradient exists. None means that it is not implemented, unless
            the op is `spelled`: then it follows from the smaller ops. Integer and boolean outputs need none.
        gradient_from_output: for an op with one input, the gradient in terms of the output and `d` alone, if these
            suffice. A function returns "" for attributes with which they do not.
        spelled: the same op in smaller ops, for a library op: `spelled(build, op)` adds them with the Builder of
            gradient rules. It returns, for each output that `op` has, in order, a tensor of the dtype and shape that
            `op` declares. It reads op.inputs, op.outputs (only dtypes and their number) and op.attrs. It builds with:
            pointwise kinds (including BroadcastTo, with data_format for operands along a channel axis), ReduceSum,
            ReduceMean and ReduceMax with keep_dims, SumTo, and, if an output or an operand lacks the reduced axes,
            Squeeze and Unsqueeze; StaticReshape and ReshapeTo only in GroupNorm, which splits the channel axis. f16
            and bf16 are cast to f32 first and rounded once, at the end. It is numerically sound in f32: a variance is
            the mean of squared distances from the mean, and the largest value is subtracted before Exp. Raises
            Unimplemented if it would need an unknown rank or size, or arithmetic on dtypes that have none (f8, s4,
            u4); the op then runs whole.
        torch_calls: the torch functions that mean this op, for tracing.
        reads: a function of the op: for each input, True if its data is read, False if only its shape counts. None:
            the ports determine it.
        row: for a reduction: how a kernel reduces a row.
        foreign: the provider of ops of this kind, which carry an ONNX node and have attributes of any name.
        source: the source of the formula.
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
    expression: Template | None = None
    decomposition: Template | None = None
    onnx: tuple[Onnx, ...] | str = ()
    torch: Callable[..., Any] | None = None
    cost: int = 1
    commutative: bool = False
    domain: tuple[tuple[float, float], ...] = ((-4.0, 4.0),)
    source: str = ""
    check: Callable[[Op], None] | None = None
    channel_inputs: tuple[int, ...] = ()
    is_cast: bool = False
    powers: bool = False
    by_dtype: bool = False
    index_of: str | None = None
    by_position: bool = False
    also: Mapping[str, str] = field(default_factory=dict)
    gradient: Mapping[str, Template] | GradientRule | str | None = None
    gradient_from_output: Template | None = None
    spelled: Speller | None = None
    torch_calls: tuple[TorchCall, ...] = ()
    reads: Callable[[Op], Sequence[bool]] | None = None
    foreign: str = ""
    row: Row | None = None

    def __post_init__(self) -> None:
        # A mistake in a record raises at import, not at a user's call.
        mistake = find_mistake(self) or find_mistake_in_formulas(self)
        if mistake:
            raise ValueError(f"{self.kind}: {mistake}")

    @property
    def is_pointwise(self) -> bool:
        """True if each output element depends on one element of each input."""
        return self.family == "pointwise"

    @property
    def returns_several(self) -> bool:
        """True if `reference` and `torch` return one value for each output instead of a single value."""
        return not self.is_pointwise and len(self.outputs) > 1

    def decompose(self, attrs: Attrs, given: Collection[str]) -> Expr | None:
        """The decomposition of an op with these attributes and these inputs (by name); None if there is none."""
        text = self.decomposition if not callable(self.decomposition) else self.decomposition(attrs, given)
        return parse_expression(text) if text else None

    def gradient_of(self, name: str | None, attrs: Attrs, given: Collection[str]) -> Expr | None:
        """The gradient of one input as an expression, None if the record has no expression for it; see `gradient`.

        Args:
            name: of the input; None for the gradient of the only input in terms of the output.
            given: names of the inputs that the op has.
        """
        template = self.gradient_from_output
        if name is not None:
            template = self.gradient.get(name) if isinstance(self.gradient, Mapping) else None
        text = template(attrs, given) if callable(template) else template
        return parse_expression(text) if text and not text.startswith("none: ") else None

    def parts(self, op: Op) -> tuple[Op, ...]:
        """An op split into ops of one output each, if the record has their formulas; else the op itself."""
        if len(op.outputs) < 2 or not self.also:
            return (op,)
        names = dict(zip(self.input_names(len(op.inputs)), op.inputs, strict=True))
        found = [Op.locked(op.id, op.kind, op.inputs, op.outputs[:1], op.name, op.attrs)]
        for port, tensor in zip(self.outputs[1:], op.outputs[1:], strict=False):
            call = parse_expression(self.also[port.name])
            assert isinstance(call, Call)
            inputs = tuple(names[a.name] for a in call.args if isinstance(a, Var))
            attrs = get(call.kind, where=op.label).default_attrs()
            attrs.update((n, op.attrs[v.name] if isinstance(v, Param) else v) for n, v in call.attrs)
            found.append(Op.locked(op.id, call.kind, inputs, (tensor,), op.name, attrs))
        return tuple(found)

    def appended_axes(self, index: int, ndims: Sequence[int | None], attrs: Attrs) -> int:
        """The number of axes of size 1 that follow input `index` before broadcasting, given the ndim of every input."""
        others = [n or 0 for i, n in enumerate(ndims) if i != index]
        return channel_axes(ndims[index], max(others, default=0), attrs) if index in self.channel_inputs else 0

    def lies_along_channel(self, index: int, ndims: Sequence[int | None], attrs: Attrs) -> bool:
        """True if axes of size 1 follow input `index`; for unknown ranks, True if that is possible."""
        assumed = [(1 if i == index else 3) if n is None else n for i, n in enumerate(ndims)]
        return self.appended_axes(index, assumed, attrs) > 0

    def attr(self, name: str) -> Attr | None:
        """The record of the attribute called `name`, or None."""
        return next((a for a in self.attrs if a.name == name), None)

    def default_attrs(self) -> dict[str, AttrValue]:
        """Every attribute's default; a neutral value for required ones (for tests and checks of the record)."""
        return {a.name: a.example for a in self.attrs if not a.optional}

    def example_attrs(self) -> dict[str, AttrValue]:
        """Like `default_attrs`, with a neutral value for optional attributes as well."""
        return {**self.default_attrs(), **{a.name: a.example for a in self.attrs if a.optional}}

    def cxx(self, inputs: Mapping[str, str], attrs: Attrs, literal: Callable[[Any], str]) -> CxxCall:
        """The C++ expression with its inputs and attributes filled in.

        Args:
            inputs: input name -> C++ identifier, without absent optional inputs; with "position" if the op is
                `by_position`.
            attrs: attribute values.
            literal: returns the exact text of a number in the current compute type.

        Raises:
            KeyError: a name in the expression is neither an input nor an attribute.
            ValueError: the expression is not a call of one function.
        """
        assert self.expression is not None
        template = self.expression if isinstance(self.expression, str) else self.expression(attrs, inputs.keys())
        used = {n: v for n, v in attrs.items() if f"{{{n}}}" in template}
        values = {n: ("true" if v else "false") if isinstance(v, bool) else literal(v) for n, v in used.items()}
        if self.by_position:
            values["position"] = "position"
        return cxx_call(template, {**values, **inputs})

    def read_inputs(self, op: Op) -> list[LogicalTensor]:
        """The inputs whose data an op of this kind reads."""
        ports = self.with_optional(len(op.inputs))
        read = [not port.shape_only for port in ports] if self.reads is None else self.reads(op)
        return [t for t, is_read in zip(op.inputs, read, strict=True) if is_read]

    def inputs_that_say_shapes(self, op: Op) -> list[LogicalTensor]:
        """The inputs whose data the shape rule reads, and whose data is not known yet."""
        ports = self.with_optional(len(op.inputs))
        return [t for t, port in zip(op.inputs, ports, strict=True) if port.says_shape and not t.is_constant]

    def input_names(self, count: int) -> list[str]:
        """Distinct names of `count` given inputs: those of a variadic port are numbered."""
        return port_names(self.inputs, count)

    def with_optional(self, count: int) -> tuple[Port, ...]:
        """The input ports of `count` given inputs (variadic ports repeated)."""
        return ports_of(self.inputs, count)
