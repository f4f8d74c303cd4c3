"""OpDef: everything opgraph knows about one kind of op."""

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
        kind: oneDNN's name, or ONNX's where oneDNN has none.
        doc: the formula and its corner cases, one to three sentences.
        family: "pointwise" (one output element from one element of each input), "sum" (SumTo), "structural", or one
            that libraries run: "reduction", "linear", "shape", "norm", "convolution", "pooling", "resampling",
            "quantization", "parameter".
        inputs, outputs, attrs: the schema.
        types: dtype symbol -> dtypes it may stand for. One symbol is one dtype within an op.
        infer: output dimensions from inputs and attributes; raises ShapeMismatch.
        reference: NumPy meaning: `reference(*arrays, **attrs) -> array`. It is the definition; in float64 the truth.
            Of a library op with several outputs (`returns_several`): a tuple with one array for each, wanted or not.
        expression: C++ for one element, one call over names of inputs and attributes in braces:
            "og::elu({src}, {alpha})". A function of attributes and given inputs where they choose the formula. All
            inputs arrive in the op's compute type (f32 for f16 and bf16), attributes as exact literals of it, except
            where `is_cast` or `index_of` says otherwise.
        decomposition: the same op in smaller ones, in the notation of `opgraph.ir.expression`; how it is written to
            ONNX where ai.onnx has no such op. As a function it may return "" where there is none.
        onnx: its ai.onnx forms, best first; or the reason why there is none.
        torch: `torch(torch_module, *tensors, **attrs) -> tensor`, the same meaning in torch ops; used where there is
            no compiler. Of a library op with several outputs: an iterable, of which no more is taken than is wanted.
        cost: rough instructions per element, for the fusion cost model.
        commutative: whether the first two inputs may be swapped.
        domain: where tests sample the inputs, one (low, high) for all or one each.
        check: raises an OpGraphError where an op, in itself well-formed, is none of this kind (dtypes that do not mix,
            a bound given twice); called by `Graph.add_op`.
        channel_inputs: indices of inputs that, where they are 1-d, lie along the channel axis of the other: axis 1 if
            data_format is "NCX", the last if "NXC". `appended_axes` says how many axes of size 1 follow them before
            everything broadcasts as in NumPy. reference, torch and infer do that themselves; expression, onnx and
            decomposition mean operands already so aligned.
        powers: a power or the logarithm of the first input: for a positive one the expression is meant in og::positive
            too.
        is_cast: the op converts its input to the dtype of its output, which only the output tells; expression,
            reference and torch are the identity, and who calls them converts.
        by_dtype: the result depends on the dtype of the output: reference and torch take its name as the keyword `to`
            and return values of it.
        index_of: the attribute that names an axis: the expression is over the element's index along it instead of the
            element, so the input that it names is an s32 iota, and the data of the input is never read.
        by_position: the expression is also over `{position}`, the row-major index of the element in the result, an s64;
            reference and torch take it as the keyword `position`, and find it from the shapes where it is left out.
        also: of an op with several outputs, what makes those after the first: name -> one op over the inputs, in the
            notation of `opgraph.ir.expression`. Each output is then computed by itself, if anybody asks for it; what
            the formulas have in common is left to the compiler.
        gradient: input name -> its gradient, in the notation of `opgraph.ir.expression`, over the names of the inputs,
            `d`, the gradient of the (first) output, and the names of the outputs, with "0" where the derivative is
            zero everywhere, and "none: " and the reason where this input has none; or a function, where it takes more
            than a formula. It is linear in `d`. Sums over broadcast axes and casts to the input's dtype are added by
            who applies it. A text is the reason why no gradient exists; None means that nobody wrote it, unless the op
            is `spelled`: then the gradient is that of the smaller ops. Outputs of integers and booleans need none.
        gradient_from_output: of an op with one input, its gradient over the output and `d` alone, where these suffice.
            As a function it returns "" for attributes with which they do not.
        spelled: the same op in smaller ones, for an op that a library runs: `spelled(build, op)` adds them with the
            Builder of gradient rules and returns, for each output that `op` has, in order, a tensor of the dtype and
            shape that `op` declares. It reads op.inputs, op.outputs (dtypes and their number alone) and op.attrs. What
            it builds with: pointwise kinds (BroadcastTo among them, with data_format for what lies along a channel
            axis), ReduceSum, ReduceMean and ReduceMax with keep_dims, SumTo, and, where an output or an operand lacks
            the reduced axes, Squeeze and Unsqueeze; StaticReshape and ReshapeTo only in GroupNorm, which splits the
            channel axis. f16 and bf16 are cast to f32 first and rounded once, at the end. It is sound in f32: a
            variance is the mean of squared distances from the mean, and the largest value is subtracted before Exp.
            Raises Unimplemented where it would need a rank or a size that nobody knows, or an op would need arithmetic
            on dtypes that have none (f8, s4, u4); the op is then run whole.
        torch_calls: the torch functions that mean this op, for tracing.
        reads: which inputs of an op are read, of the others only the shape counts; None: the ports say so.
        row: of a reduction: how a kernel reduces a row.
        foreign: who runs ops of this kind, which carry an ONNX node and hold attributes of any name.
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
        # Mistakes in a record fail at import, not on a user's machine.
        mistake = find_mistake(self) or find_mistake_in_formulas(self)
        if mistake:
            raise ValueError(f"{self.kind}: {mistake}")

    @property
    def is_pointwise(self) -> bool:
        """Whether one output element depends on one element of each input."""
        return self.family == "pointwise"

    @property
    def returns_several(self) -> bool:
        """Whether `reference` and `torch` return one value for each output, not one alone."""
        return not self.is_pointwise and len(self.outputs) > 1

    def decompose(self, attrs: Attrs, given: Collection[str]) -> Expr | None:
        """The decomposition of an op with these attributes and these inputs (by name); None where there is none."""
        text = self.decomposition if not callable(self.decomposition) else self.decomposition(attrs, given)
        return parse_expression(text) if text else None

    def gradient_of(self, name: str | None, attrs: Attrs, given: Collection[str]) -> Expr | None:
        """The gradient of one input as an expression, where the record says it in one; see `gradient`.

        Args:
            name: of the input; None for the gradient of the only input from the output.
            given: names of the inputs that the op has.
        """
        template = self.gradient_from_output
        if name is not None:
            template = self.gradient.get(name) if isinstance(self.gradient, Mapping) else None
        text = template(attrs, given) if callable(template) else template
        return parse_expression(text) if text and not text.startswith("none: ") else None

    def parts(self, op: Op) -> tuple[Op, ...]:
        """An op as ops of one output each, where the record says how; else the op itself."""
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
        """How many axes of size 1 follow input `index` before broadcasting, given the ndim of every input."""
        others = [n or 0 for i, n in enumerate(ndims) if i != index]
        return channel_axes(ndims[index], max(others, default=0), attrs) if index in self.channel_inputs else 0

    def lies_along_channel(self, index: int, ndims: Sequence[int | None], attrs: Attrs) -> bool:
        """Whether axes follow input `index`; unknown ranks are taken to be those for which they do."""
        assumed = [(1 if i == index else 3) if n is None else n for i, n in enumerate(ndims)]
        return self.appended_axes(index, assumed, attrs) > 0

    def attr(self, name: str) -> Attr | None:
        """The attribute record of that name."""
        return next((a for a in self.attrs if a.name == name), None)

    def default_attrs(self) -> dict[str, AttrValue]:
        """Every attribute's default; a neutral value for required ones (for tests and checks of the record)."""
        return {a.name: a.example for a in self.attrs if not a.optional}

    def example_attrs(self) -> dict[str, AttrValue]:
        """As `default_attrs`, with a neutral value for optional attributes too."""
        return {**self.default_attrs(), **{a.name: a.example for a in self.attrs if a.optional}}

    def cxx(self, inputs: Mapping[str, str], attrs: Attrs, literal: Callable[[Any], str]) -> CxxCall:
        """The C++ expression with its inputs and attributes filled in.

        Args:
            inputs: input name -> C++ identifier. Optional inputs that are absent are left out. "position" too, if
                the op goes by it.
            attrs: attribute values.
            literal: how a number is written, exactly, in the compute type at hand.

        Raises:
            KeyError: the expression names neither an input nor an attribute.
            ValueError: it is no call of one function.
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
        """The inputs whose data the shape rule reads, and which have none yet."""
        ports = self.with_optional(len(op.inputs))
        return [t for t, port in zip(op.inputs, ports, strict=True) if port.says_shape and not t.is_constant]

    def input_names(self, count: int) -> list[str]:
        """Names of `count` given inputs, each its own: those of a variadic port are numbered."""
        return port_names(self.inputs, count)

    def with_optional(self, count: int) -> tuple[Port, ...]:
        """The input ports that `count` given inputs stand for (variadic ports repeated)."""
        return ports_of(self.inputs, count)
