"""Selects the ATen nodes that opgraph computes, and translates them into ops of a Graph.

Pointwise ops are looked up by name in the table for traced functions (`opgraph.torch.tracing.calls`). This module adds
ops that only captured graphs have: casts, fills, reductions, joins (`axis_splits`), and derivatives of activations.
"""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any

import torch
from torch.fx import Node, map_arg

from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.runtime.providers.torch_dtypes import NAMES
from opgraph.runtime.providers.torch_internals import HigherOrderOperator, OpOverload
from opgraph.torch.graph.axis_splits import AxisSplit, Join, join_of
from opgraph.torch.graph.refused_operands import has_number, is_refused
from opgraph.torch.tracing import calls
from opgraph.torch.tracing.emit import Emitter, Value, compute_dtype
from opgraph.torch.tracing.session import Number

aten, prims = torch.ops.aten, torch.ops.prims

#: Views: their result aliases the memory of their argument.
VIEWS = frozenset(
    (
        aten.alias, aten.as_strided, aten.detach, aten.diagonal, aten.expand, aten.narrow, aten.permute, aten.reshape,
        aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.squeeze, aten.t, aten.transpose, aten.unbind,
        aten.unsqueeze, aten.view, aten._unsafe_view, aten.unfold, aten.lift_fresh,
    )
)  # fmt: skip
_CASTS = frozenset((aten._to_copy, aten.clone, prims.convert_element_type))
#: Ops that fill a tensor with one number -> the place of the number among their arguments.
_FILLS = {aten.full: 1, aten.scalar_tensor: 0}
#: Ops whose numbers often follow from sizes, such as the count of a mean. The kernel reads such a factor or divisor as
#: an operand, so that its text is the same for other sizes.
_SCALES = frozenset((aten.mul, aten.div))
#: In the meta of a node: the places and names of its arguments that are numbers computed from symbolic sizes.
FROM_SIZES = "opgraph_from_sizes"
#: In the meta of a node: the bytes of its value for the sizes that a graph with symbols was traced with.
TRACED_BYTES = "opgraph_traced_bytes"
_REDUCTIONS = {
    aten.sum: "ReduceSum", aten.mean: "ReduceMean", aten.amax: "ReduceMax", aten.amin: "ReduceMin",
}  # fmt: skip
#: Derivatives of activations: (kind, places of its inputs among the arguments).
_DERIVATIVES: dict[Any, tuple[str, tuple[int, ...]]] = {
    aten.silu_backward: ("SwishBackward", (1, 0)),
    aten.gelu_backward: ("GELUBackward", (1, 0)),
    aten.mish_backward: ("MishBackward", (1, 0)),
}
#: Integers of these dtypes are positions and shapes more often than data: torch computes them.
_INTEGERS = (torch.int64, torch.int32, torch.int16)
_SMALL_INTEGERS = (torch.uint8, torch.int8)
#: Comparisons whose result changes if a value overflows f16: a kernel would compare the value before it is rounded.
_ROUNDED = frozenset((aten.eq, aten.ne, aten.isinf, aten.isnan, aten.isfinite, aten.isposinf, aten.isneginf))


def packet(node: Node) -> Any:
    """The ATen op of a node without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def value_of(node: Node) -> Any:
    """The value of the node, as a tensor without data."""
    return node.meta.get("val")


def bytes_of(node: Node) -> int:
    """The bytes of a node's value; 0 if it is not a tensor, such as a tuple, whose elements are separate values.

    They determine which nodes form a kernel. Two programs of one graph for different sizes have the same kernels,
    because both count the bytes for the sizes that the graph was traced with.
    """
    traced: int | None = node.meta.get(TRACED_BYTES)
    value = value_of(node)
    if traced is not None or not isinstance(value, torch.Tensor):
        return traced or 0
    return int(value.numel()) * value.dtype.itemsize


def is_fill(node: Node) -> bool:
    """True if the node fills a tensor with one number."""
    return node.op == "call_function" and packet(node) in _FILLS


def is_reduction(node: Node) -> bool:
    """True if the node reduces axes of a tensor."""
    return node.op == "call_function" and packet(node) in _REDUCTIONS


def keeps_axes(node: Node) -> bool:
    """True if a reduction keeps the reduced axes, with one element."""
    return bool(_argument(node, 2, "keepdim", False))


def reduced_axes(node: Node) -> tuple[int, ...]:
    """The axes that a reduction reduces, counted from 0, in ascending order; all axes if it names none."""
    rank = value_of(node.args[0]).dim()  # type: ignore[arg-type]
    given = _argument(node, 1, "dim")
    if given is None or given == [] or rank == 0:
        return tuple(range(rank))
    return tuple(sorted({axis % rank for axis in ([given] if isinstance(given, int) else given)}))


def is_random(node: Node) -> bool:
    """True if the node draws random numbers, or may do so. Attention with a dropout of 0 does not."""
    if isinstance(node.target, HigherOrderOperator):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _dropout_of(node) != 0


def _dropout_of(node: Node) -> Any:
    """The dropout probability of an op; None if it has no such argument."""
    schema: Any = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            return (
                node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
    return None


def writes(node: Node) -> bool:
    """True if a call may write into its arguments; not every schema declares that."""
    # A random op that a checkpoint repeats is a call with that op among its arguments.
    schemas = [s for target in (node.target, *node.args) if (s := getattr(target, "_schema", None)) is not None]
    if not schemas:
        return node.target is not operator.getitem
    return any(s.is_mutable or not s.returns or str(s.name).endswith("_") for s in schemas)


def is_computed(node: Node) -> bool:
    """True if opgraph computes the node in a kernel."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    made, op = value_of(node), packet(node)
    if not _is_data(made) or made.dtype in _INTEGERS:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    given = [value_of(n) for n in node.all_input_nodes]
    if not all(_is_data(v) for v in given):
        return False
    if op in _FILLS:
        number: Any = node.args[_FILLS[op]]
        is_float = isinstance(number, (int, float)) and made.dtype.is_floating_point
        return not given and (not is_float or has_number(made.dtype, number))
    if any(v.device != made.device and not is_fill(n) for n, v in zip(node.all_input_nodes, given, strict=True)):
        return False
    if op in _CASTS:  # torch's conversion of numbers out of a small integer's range depends on the processor
        return made.dtype not in _SMALL_INTEGERS or not given[0].dtype.is_floating_point
    if op in _ROUNDED and any(v.dtype is torch.float16 for v in given):
        return False
    if op in _REDUCTIONS:
        return made.dtype.is_floating_point and given[0].dtype not in _INTEGERS
    if any(v.dtype in _INTEGERS and v.dim() for v in given):
        return False
    if op in _DERIVATIVES or join_of(node) is not None:
        return True
    if _pointwise(op) is None or _bound(node) is None:
        return False
    return not is_refused(node.target, *map_arg((node.args, node.kwargs), value_of))


def is_elementwise(node: Node) -> bool:
    """True if each element of a computed node is computed from the elements at the same place in its operands."""
    if is_reduction(node) or is_fill(node) or join_of(node) is not None:
        return False
    return packet(node) in _CASTS or packet(node) in _DERIVATIVES or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _is_data(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in NAMES
        and value.layout is torch.strided
        and value.numel() > 0
        and value.device.type in ("cpu", "cuda")
        and not value.is_neg()  # torch negates such a tensor when it reads it
    )


def _argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


@cache
def _pointwise(op: Any) -> calls.Found | None:
    """The table's entry for the torch function with the name of an ATen op; None if there is none."""
    name = getattr(op, "__name__", "")
    if op.__module__.split(".")[-1] != "aten" and not str(op).startswith("aten."):
        return None
    table = calls.table()
    for space in (torch, torch.nn.functional, torch.special, torch.Tensor):
        function = getattr(space, name.removeprefix("special_"), None)
        if function is not None and (found := table.get(function)) is not None and not found.inplace:
            return found
    return None


def _bound(node: Node) -> dict[str, Any] | None:
    """The arguments of a pointwise node by the parameter names of the torch function; None if it is another overload,
    or has numbers that opgraph does not support."""
    found = _pointwise(packet(node))
    schema = node.target._schema  # type: ignore[union-attr]
    if found is None or schema.is_mutable:
        return None
    names = dict(found.parameters)
    bound = {}
    for place, argument in enumerate(schema.arguments):
        name = "input" if argument.name == "self" and "input" in names else argument.name
        has = len(node.args) > place or argument.name in node.kwargs
        given = _argument(node, place, argument.name, argument.default_value)
        if name in names:
            bound[name] = given
        elif (has and given != argument.default_value) or not argument.has_default_value():
            return None
    for name, default in found.parameters:
        if bound.setdefault(name, default) is calls.REQUIRED:
            return None
    return bound if found.takes(bound) else None


def _has_number_from_sizes(node: Node) -> bool:
    """True if a number that a node computes with follows from symbolic sizes."""
    found = node.meta.get(FROM_SIZES, ())
    return _FILLS[packet(node)] in found if is_fill(node) else bool(found)


class NodeEmitter(Emitter):
    """Adds the ops of nodes to a graph, with the casts of torch's type promotion.

    Args:
        graph: the graph to build.
        values: the tensors of the nodes that were added so far.
        as_eager: True: numbers are rounded where eager torch's kernels round them.
        split: the axis that the graph's tensors have as two axes.
        columns: sums that keep their axes and are computed in one pass with everything else.
    """

    def __init__(
        self,
        graph: Graph,
        values: dict[Node, LogicalTensor],
        *,
        as_eager: bool = False,
        split: AxisSplit | None = None,
        columns: AbstractSet[Node] = frozenset(),
    ) -> None:
        self.graph = graph
        self.values = values
        self.as_eager = as_eager
        self._split = split
        self._columns = columns
        self._blocks: dict[tuple[int, ...], LogicalTensor] = {}
        self.on_host = True
        self.what = ""
        self._found: calls.Found | None = None
        self._casts: dict[tuple[int, str], LogicalTensor] = {}
        #: Inputs that only provide a shape; a kernel does not read them.
        self.shapes: list[LogicalTensor] = []
        #: Constants that kernels read as operands: id -> the number before it was rounded.
        self.arguments: dict[int, float] = {}
        self._numbers: dict[tuple[str, str | None], LogicalTensor] = {}
        self._takes_arguments = False

    def add(self, node: Node) -> None:
        """Adds the ops of a node to the graph, and its value to `values`.

        Raises:
            OpGraphError: opgraph has no op for these arguments.
        """
        self.what = str(packet(node))
        self.on_host = value_of(node).device.type == "cpu"
        self._takes_arguments = packet(node) in _SCALES or _has_number_from_sizes(node)
        made = self._made(node)
        self.values[node] = made

    def _made(self, node: Node) -> LogicalTensor:
        op, result = packet(node), value_of(node)
        name = NAMES[result.dtype]
        if op in _FILLS:
            return self._constant(node.args[_FILLS[op]], name)  # type: ignore[arg-type]
        if op in _CASTS:
            source = self._value(node.args[0])
            cast = self._tensor(self._converted(source, name))
            return self._tensor(self.step("Identity", (cast,), name)) if cast is source.operand else cast
        if op in _REDUCTIONS:
            sizes = value_of(node.args[0]).shape  # type: ignore[arg-type]
            reduced = self._spread(self._tensor(self._as(self._value(node.args[0]), name)), self._shape(sizes))
            if node in self._columns:
                like = self._like(self._shape(result.shape))
                return self._tensor(self.step("SumTo", (reduced, like), name))
            axes = list(reduced_axes(node))
            axes = axes if self._split is None else self._split.axes(len(sizes), axes)
            attrs = {"axes": axes, "keep_dims": keeps_axes(node)}
            return self._tensor(self.step(_REDUCTIONS[op], (reduced,), name, attrs))
        if op in _DERIVATIVES:
            kind, places = _DERIVATIVES[op]
            operands = tuple(self._as(self._value(node.args[p]), name) for p in places)
            exact = node.kwargs.get("approximate", "none") == "none"
            attrs = {"mode": "gelu_erf" if exact else "gelu_tanh"} if op is aten.gelu_backward else {}
            return self._tensor(self.step(kind, operands, name, attrs))
        if (join := join_of(node)) is not None:
            return self._joined(join, tuple(result.shape), name)
        found, bound = _pointwise(op), _bound(node)
        assert found is not None and bound is not None
        compute = compute_dtype(result, {k: value_of(v) if isinstance(v, Node) else v for k, v in bound.items()})
        return self._tensor(self.call(found, bound, result.dtype, compute))

    def _joined(self, join: Join, sizes: tuple[int, ...], dtype: str) -> LogicalTensor:
        """The value of a join, which has each part in its block."""
        assert join.split == self._split
        made = self._tensor(self._as(self._value(join.rest), dtype))
        if not join.parts:  # one part, repeated
            return self._spread(made, self._shape(sizes))
        for place, part in sorted(join.parts.items()):
            here = self.step("Equal", (self._block_numbers(sizes), Number(place)), "boolean")
            made = self._tensor(self.step("Select", (here, self._as(self._value(part), dtype), made), dtype))
        return made

    def _block_numbers(self, sizes: tuple[int, ...]) -> LogicalTensor:
        """The block number of each element of a join. (With fewer elements it would become a separate kernel.)"""
        if sizes not in self._blocks:
            assert self._split is not None
            axis = len(sizes) + self._split.axis
            self._blocks[sizes] = self.step("GenIndex", (self._like(self._shape(sizes)),), "s32", {"axis": axis})
        return self._blocks[sizes]

    def _shape(self, sizes: Any) -> tuple[int, ...]:
        return tuple(sizes) if self._split is None else self._split.shape(sizes)

    def _like(self, shape: tuple[int, ...]) -> LogicalTensor:
        like = self.graph.input(f"shape{len(self.shapes)}", "boolean", shape)
        self.shapes.append(like)
        return like

    def _converted(self, value: Value, dtype: str) -> Any:
        if value.dtype is None or value.dtype == dtype:
            return self._as(value, dtype)
        return self.convert(value.operand, value.dtype, dtype)

    def _tensor(self, operand: Any) -> LogicalTensor:
        if isinstance(operand, Number):
            return self._constant(operand.value, operand.dtype)
        assert isinstance(operand, LogicalTensor)
        return operand

    def _constant(self, value: float, dtype: str | None) -> LogicalTensor:
        if not self._takes_arguments:
            return self.graph.constant("", value, dtype=dtype)
        key = repr(value), dtype  # 0.0 is not -0.0
        if key not in self._numbers:
            self._numbers[key] = self.graph.constant("", value, dtype=dtype)
            self.arguments[self._numbers[key].id] = value
        return self._numbers[key]

    def result(self, node: Node) -> LogicalTensor:
        """The value of a node in its full shape, as the result of an op."""
        tensor = self._spread(self.values[node], self._shape(value_of(node).shape))
        return self._tensor(self.step("Identity", (tensor,), tensor.dtype)) if tensor.is_constant else tensor

    def _spread(self, tensor: LogicalTensor, shape: tuple[int, ...]) -> LogicalTensor:
        """The tensor, broadcast to a shape if it has another one."""
        if tensor.dims is not None and tuple(tensor.dims) == shape:
            return tensor
        made: LogicalTensor = self.graph.add_op("BroadcastTo", tensor, self._like(shape))
        return made

    def _value(self, given: Any) -> Value:
        if isinstance(given, Node):
            tensor = self.values[given]
            return Value(tensor, tensor.dtype, tensor.ndim == 0)
        return Value(Number(given), None)

    # -- the interface of Emitter -----------------------------------------------------------------------------------

    def leaf(self, value: Any, name: str) -> Value:
        """An argument of a call: a node, or a number."""
        if isinstance(value, Node):
            return self._value(value)
        return Value(Number(self._number(value, name)), None)

    def step(self, kind: str, operands: Any, dtype: str, attrs: dict[str, Any] | None = None) -> Any:
        """Adds one op; returns its result."""
        return self.graph.add_op(kind, *map(self._tensor, operands), dtype=dtype, **(attrs or {}))

    def cast(self, ref: Any, dtype: str) -> Any:
        """A TypeCast; the same value is cast once."""
        key = ref.id, dtype
        if key not in self._casts:
            self._casts[key] = self.step("TypeCast", (ref,), dtype)
        return self._casts[key]
