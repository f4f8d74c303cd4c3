"""Random graphs around rows: reductions of several depths and forms, and pointwise ops before, between and after."""

from __future__ import annotations

import random

import opgraph as og
from opgraph.ir.logical_tensor import LogicalTensor

_UNARY = ("Tanh", "Sigmoid", "GELU", "Exp", "Abs", "Square", "Sqrt", "Neg")
_BINARY = ("Add", "Subtract", "Multiply", "Maximum")
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2")


class _Pool:
    """The values so far: of the whole shape, one for each row with the rows' axes, and without."""

    def __init__(self, graph: og.Graph, rank: int, rows: tuple[int, ...], dtype: str, choose: random.Random) -> None:
        self.graph, self.choose, self.rank, self.rows = graph, choose, rank, rows
        dims: tuple[str, ...] = tuple(f"n{i}" for i in range(rank))
        kept = tuple(1 if i in rows else d for i, d in enumerate(dims))
        dropped = tuple(d for i, d in enumerate(dims) if i not in rows)
        self.full = [graph.input("x", dtype=dtype, shape=dims), graph.input("z", dtype=dtype, shape=dims)]
        self.kept = [graph.input("k", dtype=dtype, shape=kept)]
        self.dropped = [graph.input("d", dtype=dtype, shape=dropped)]
        last = graph.input("w", dtype=dtype, shape=dims[-1:])
        self.small = [last, graph.input("s", dtype=dtype, shape=())]
        self.made: list[LogicalTensor] = []

    def step(self) -> None:
        pick = self.choose.choice
        kind = pick(("unary", "binary", "binary", "reduce", "reduce", "row", "row", "view", "sum", "small"))
        if kind == "reduce":
            keep = self.choose.random() < 0.6
            made = self.graph.add_op(pick(_REDUCTIONS), pick(self.full), axes=self._axes(), keep_dims=keep)
            (self.kept if keep else self.dropped).append(made)
        elif kind == "row":
            pool = pick((self.kept, self.dropped))
            if self.choose.random() < 0.5:
                made = self._unary(pick(pool))
            else:
                made = self.graph.add_op(pick(_BINARY), pick(pool), pick([*pool, self.small[1]]))
            pool.append(made)
        elif kind == "view":
            if self.choose.random() < 0.7:
                made = self.graph.add_op("Unsqueeze", pick(self.dropped), axes=self.rows)
                self.kept.append(made)
            else:
                made = self.graph.add_op("Squeeze", pick(self.kept), axes=self.rows)
                self.dropped.append(made)
        elif kind == "sum":
            made = self.graph.add_op("SumTo", pick(self.full), pick([*self.kept, *self.small]))
            if made.dims == self.kept[0].dims:
                self.kept.append(made)
        elif kind == "unary":
            made = self._unary(pick(self.full))
            self.full.append(made)
        else:
            other = pick([*self.full, *self.kept, *self.kept, *(self.small if kind == "small" else ())])
            made = self.graph.add_op(pick(_BINARY), pick(self.full), other)
            self.full.append(made)
        self.made.append(made)

    def _unary(self, value: LogicalTensor) -> LogicalTensor:
        kind = self.choose.choice(_UNARY)
        if kind in ("Sqrt", "Exp"):  # on operands for which they are harmless
            value = self.graph.add_op("Sigmoid", value)
        made: LogicalTensor = self.graph.add_op(kind, value)
        return made

    def _axes(self) -> tuple[int, ...]:
        return tuple(a - self.rank if self.choose.random() < 0.5 else a for a in self.rows)


def row_graph(seed: int, dtype: str = "f64", *, not_last: bool = False) -> og.Graph:
    """A finalized graph; inputs are named in `_Pool`, dimensions n0, n1, ...

    Args:
        not_last: the last axis is not an axis of rows, if there is another.
    """
    choose = random.Random(seed)
    rank = choose.choice((1, 2, 2, 3, 4))
    inner = [(rank - 1,), tuple(range(rank - 1, rank)), tuple(range(rank))]
    if rank > 2:
        inner += [(rank - 2, rank - 1), (0, rank - 1)]
    if not_last and rank > 1:
        inner = [(0,), (rank - 2,), *([(0, 1)] if rank > 2 else [])]
    rows = choose.choice(inner)
    graph = og.Graph()
    pool = _Pool(graph, rank, rows, dtype, choose)
    for _ in range(choose.randint(4, 14)):
        pool.step()
    wanted = {t.id: t for t in choose.sample(pool.made, min(len(pool.made), choose.randint(1, 4)))}
    wanted[pool.made[-1].id] = pool.made[-1]
    graph.set_outputs(wanted.values())
    return graph.finalize()


def sizes(seed: int, rank: int) -> tuple[int, ...]:
    """Extents for a graph of that rank; sometimes 1, sometimes 0."""
    choose = random.Random(1000 + seed)
    return tuple(
        choose.choice((1, 2, 3, 5, 7, 13, 33, 40, 0 if rank > 1 and choose.random() < 0.2 else 4)) for _ in range(rank)
    )
