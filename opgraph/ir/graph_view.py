"""Content: the read-only side of a graph; `Graph` adds the methods that build it."""

from __future__ import annotations

from collections.abc import Iterator

from opgraph.errors import InvalidArguments
from opgraph.ir.graph_storage import Tables
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op


class Content:
    """The ops and tensors of a graph. Abstract: `Graph` fills it."""

    _tables: Tables
    #: Ops in topological order; None until the graph is finalized.
    _order: tuple[Op, ...] | None
    _consumers: dict[int, list[Op]]
    _outputs: tuple[int, ...]

    @property
    def is_finalized(self) -> bool:
        """True if `finalize` succeeded; the graph can then no longer be changed."""
        return self._order is not None

    @property
    def inputs(self) -> tuple[LogicalTensor, ...]:
        """Inputs in declaration order. Constants are not among them."""
        return tuple(self._tables.tensors[i] for i in self._tables.inputs)

    @property
    def outputs(self) -> tuple[LogicalTensor, ...]:
        """Outputs: the declared ones in order, then all values without a consumer."""
        ids = self._outputs if self.is_finalized else self._tables.output_ids()
        return tuple(self._tables.tensors[i] for i in ids)

    @property
    def constants(self) -> tuple[LogicalTensor, ...]:
        """Constants in declaration order."""
        return tuple(t for t in self._tables.tensors.values() if t.is_constant)

    @property
    def ops(self) -> tuple[Op, ...]:
        """Ops: in topological order once finalized, before that in the order of addition."""
        return self._order if self._order is not None else tuple(self._tables.ops.values())

    def tensor(self, id: int) -> LogicalTensor:
        """The logical tensor of an id; before `finalize`, as far as known.

        Raises:
            InvalidArguments: unknown id.
        """
        try:
            return self._tables.tensors[id]
        except (KeyError, TypeError):
            raise InvalidArguments(
                f"there is no tensor {id}", where="Graph.tensor", fix="use an id of this graph"
            ) from None

    def producer(self, id: int) -> Op | None:
        """The op that makes a tensor; None for inputs and constants."""
        return self._tables.producer.get(id)

    def consumers(self, id: int) -> list[Op]:
        """The ops that read a tensor, one entry per use; the graph must be finalized."""
        return self._consumers.get(id, [])

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self._tables.ops)

    def __str__(self) -> str:
        from opgraph.ir.text import graph_text  # it imports this module

        return graph_text(self)

    def __repr__(self) -> str:
        return f"<Graph: {len(self.inputs)} inputs, {len(self)} ops, {len(self.outputs)} outputs>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Content):
            return NotImplemented
        from opgraph.ir.equality import fingerprint  # it imports this module

        return self is other or fingerprint(self) == fingerprint(other)

    __hash__ = None  # type: ignore[assignment]  # a graph changes until it is finalized
