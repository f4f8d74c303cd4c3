"""Graph: ops on logical tensors, connected by tensor id. All graphs are built with it; `finalize` locks it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from opgraph.errors import InvalidArguments, InvalidGraph
from opgraph.ir.constants import constant_data
from opgraph.ir.dims import checked_dims
from opgraph.ir.graph_storage import Tables
from opgraph.ir.graph_view import Content
from opgraph.ir.logical_tensor import Dim, LogicalTensor
from opgraph.ir.modes import checked_modes
from opgraph.ir.op import Op
from opgraph.ir.op_validation import checked_op, short_form
from opgraph.ir.pause_gc import no_collector
from opgraph.ir.verify import verify_graph

if TYPE_CHECKING:
    from opgraph.partition.partition import Partition
    from opgraph.partition.report import Report


class Graph(Content):
    """A directed acyclic graph of ops on logical tensors.

    There are two ways to build it, which can be mixed: oneDNN's (`add_op(Op(...))` on LogicalTensors that the caller
    numbers) and the short form (`input`, `constant`, `add_op("Kind", x, y, attr=...)`, `output`).

    Graphs compare by content: kinds, attributes, wiring, shapes, dtypes, constants by their bits, and the names of
    inputs and outputs. Ids, the order of insertion, op names and names of inner tensors do not count.

    Args:
        engine: the engine kind of the partitions, "cpu" or "cuda"; an Engine stands for its kind.
        fpmath: oneDNN's mode for reduced precision; only "strict" (none) is supported.

    Raises:
        InvalidArguments: unknown engine kind or fpmath mode.
        Unimplemented: a fpmath mode other than "strict".

    Source: oneDNN Graph `graph`.
    """

    def __init__(self, engine: str = "cpu", fpmath: str = "strict") -> None:
        self.engine = checked_modes(engine, fpmath)
        self.fpmath = fpmath
        self._tables = Tables()
        self._order = None
        self._consumers = {}
        self._outputs = ()
        #: Default values of inputs that a call omits, by name (an ONNX model may have some). Like `source`, they are
        #: not part of the graph's content: the text form omits them, and equality ignores them.
        self.defaults: dict[str, Any] = {}
        #: Remarks of the importer or other builder of the graph; `explain` prints them.
        self.notes: list[str] = []
        #: The origin of an imported graph; an export takes names and metadata from it. Not part of the content.
        self.source: object | None = None

    # -- building -----------------------------------------------------------------------------------------------

    def input(self, name: str, dtype: str = "f32", shape: Sequence[Dim] | None = ()) -> LogicalTensor:
        """Declares an input.

        Args:
            name: unique among the inputs; arrays are bound by it.
            dtype: a dtype name.
            shape: int, None (unknown) or a symbol (str) per dimension; None if the number of dimensions is unknown.

        Raises:
            InvalidGraph: the graph is finalized, or has an input of that name.
            InvalidArguments, InvalidDataType: invalid name, dimension or dtype.
        """
        self._check_open(f'input "{name}"')
        if not isinstance(name, str) or not name:
            raise InvalidArguments(f"{name!r} is no name", where="Graph.input", fix="give the input a non-empty str")
        if name in self._tables.declared:
            raise InvalidGraph(
                f"there are two inputs called {name!r}", where="Graph.input", fix="give each input its own name"
            )
        dims = checked_dims(shape, f'input "{name}"')
        return self._add_input(LogicalTensor(self._next_tensor, dtype, dims, name=name))

    def constant(self, name: str, value: Any, dtype: str | None = None) -> LogicalTensor:
        """Declares a constant: a LogicalTensor with data, no op.

        Args:
            name: for messages and the text form; "" for none.
            value: an array, or a Python number. A number without `dtype` takes the dtype of the first operands that an
                op combines it with, and is rounded to it (f32 if there are none). A writable array is copied.
            dtype: the dtype to convert to: floats are rounded once, other values must be representable exactly.

        Raises:
            InvalidGraph: the graph is finalized.
            InvalidDataType: opgraph does not have the dtype, or the dtype does not hold a value.
            InvalidArguments: `value` is neither a number nor an array.
        """
        where = f'constant "{name}"'
        self._check_open(where)
        kind, data = constant_data(value, dtype, where)
        tensor = LogicalTensor(self._next_tensor, kind, data.shape, property="constant", name=name or None, data=data)
        self._tables.enter_tensor(tensor)
        return tensor

    def add_op(
        self,
        op: Op | str,
        /,
        *inputs: LogicalTensor | float,
        name: str = "",
        dtype: str | None = None,
        outputs: int | None = None,
        **attrs: Any,
    ) -> Any:
        """Adds an op: a complete `Op`, which is copied, or (short form) a kind with its inputs and attributes.

        Args:
            op: an Op, or the name of a kind.
            inputs: LogicalTensors; a number stands for a scalar constant.
            name: names the op and its (first) output.
            dtype: dtype of the output if the inputs do not determine it (TypeCast).
            outputs: number of outputs, for kinds with a variable number.
            attrs: attributes by keyword.

        Returns: in the short form the output LogicalTensor, a tuple for several outputs; otherwise None.

        Raises:
            InvalidGraphOp, InvalidDataType, InvalidShape: the op does not fit its schema.
            InvalidGraph: the graph is finalized, an id is taken, or (short form) a tensor belongs to another graph. An
                `Op` is wired by ids alone, as in oneDNN.
            In every case the graph is unchanged.
        """
        if isinstance(op, Op):
            self._check_open(op.label)
            if inputs or attrs or name or dtype is not None or outputs is not None:
                raise InvalidArguments(
                    "an Op is added alone", where=op.label, fix="set its inputs and attributes on the Op"
                )
            self._add(op.id, op.kind, op.inputs, op.outputs, op.name, op.attrs)
            return None
        self._check_open(f"add_op({op!r})")
        given, made = short_form(self._tables, op, inputs, name, dtype, outputs)
        added = self._add(self._next_op, op, given, made, name, attrs, short=True)
        return added.outputs[0] if len(added.outputs) == 1 else added.outputs

    def output(self, *tensors: LogicalTensor) -> None:
        """Marks tensors as outputs (oneDNN's End). Values without a consumer are outputs anyway.

        Raises:
            InvalidGraph: the graph is finalized, or a tensor is not in it: the id is unknown, or belongs to a tensor of
                another name, dtype or shape. No tensor is marked then.
        """
        self._check_open("Graph.output")
        ids = self._tables.known_ids(tensors, "Graph.output")
        self._tables.outputs.update(dict.fromkeys(ids))

    def set_outputs(self, tensors: Iterable[LogicalTensor]) -> None:
        """Makes these the only outputs, in this order; other values without a consumer are dropped.

        Raises:
            InvalidGraph: as for `output`.
        """
        self._check_open("Graph.set_outputs")
        if not isinstance(tensors, Iterable):
            what = f"got {type(tensors).__name__} where tensors are expected"
            raise InvalidArguments(what, where="Graph.set_outputs", fix="give a list of logical tensors")
        ids = self._tables.known_ids(tensors, "Graph.set_outputs")
        self._tables.outputs = dict.fromkeys(ids)
        self._tables.exact_outputs = True

    def __copy__(self) -> Graph:
        return copy.deepcopy(self)  # ops added to the copy are not added to the original

    def _check_open(self, where: str) -> None:
        if self._order is not None:
            raise InvalidGraph("the graph is finalized and cannot be changed", where=where, fix="build a new Graph")

    # For importers and the text form: they choose ids, and declare outputs separately.

    @property
    def _next_tensor(self) -> int:
        return self._tables.next_tensor

    @property
    def _next_op(self) -> int:
        return self._tables.next_op

    def _add_input(self, tensor: LogicalTensor) -> LogicalTensor:
        self._tables.enter_input(tensor)
        return tensor

    def _add(
        self,
        op_id: int,
        kind: str,
        inputs: tuple[LogicalTensor, ...],
        outputs: tuple[LogicalTensor, ...],
        name: str,
        attrs: dict[str, Any],
        *,
        short: bool = False,
    ) -> Op:
        op = checked_op(self._tables, op_id, kind, inputs, outputs, name, attrs, infer=short)
        self._tables.enter(op)
        return op

    # -- life cycle ---------------------------------------------------------------------------------------------

    def finalize(self) -> Graph:
        """Connects, checks and locks the graph; does nothing the second time. Returns the graph.

        Raises:
            InvalidGraph: mentions of one tensor disagree, the graph has a cycle, input or output names clash.
            InvalidShape: contradictory shapes.
            After an error the graph is unchanged and open.
        """
        if self._order is None:
            with no_collector():
                outputs = self._tables.output_ids()
                order, self._tables.tensors, self._consumers = verify_graph(self._tables, outputs)
            self._outputs = tuple(outputs)
            self._order = order  # set last: from here on the graph is finalized, for other threads as well
        return self

    def get_partitions(self, policy: str = "fusion", *, disable: Sequence[str] = ()) -> list[Partition]:
        """Cuts the graph into partitions, in topological order; every op but End is in exactly one.

        Args:
            policy: "fusion", or "debug" (every op alone).
            disable: names of units that are not matched ("swish", "gelu" ...): their ops are computed as written.

        Raises:
            InvalidGraph: the graph is not finalized.
            InvalidArguments: unknown policy, or a unit that no rule makes.
        """
        from opgraph.partition.partitioner import partition  # imported late: a later stage
        from opgraph.partition.rules import rules_without

        return list(partition(self, policy=policy, rules=rules_without(disable)).partitions)

    def explain(self, policy: str = "fusion", *, disable: Sequence[str] = ()) -> Report:
        """For each op: its partition and rule, or the reason why it stayed unfused. Finalizes the graph if needed.

        Args:
            policy, disable: as for `get_partitions`.

        Raises:
            InvalidArguments: unknown policy, or a unit that no rule makes.
        """
        from opgraph.partition.partitioner import partition  # imported late: a later stage
        from opgraph.partition.rules import rules_without

        return partition(self.finalize(), policy=policy, rules=rules_without(disable)).report
