"""Entries timed in several sizes: one record for each formula, with the shapes of its operands. The only such list."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import opgraph as og
from opgraph.bench import formulas
from opgraph.bench.formula import Formula, Step, recorded
from opgraph.errors import InvalidArguments
from opgraph.ir import opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.transforms.saved import TrainingPlan, training_plan

#: Dtypes that can be measured; an entry may take fewer.
DTYPES = ("f32", "bf16", "f16")
FORWARD, BACKWARD = "forward", "backward"
#: For layer and RMS normalization: torch's default for the first, Llama's for the second.
EPSILON = 1e-5

FULL, ROW, COLUMN, CHANNEL, SCALAR = "full", "row", "column", "channel", "scalar"
LEFT, RIGHT, TURNED = "left", "right", "turned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An input of a formula.

    Attributes:
        name: the name of the formula's argument.
        shape: FULL: that of the space; ROW: one value for each place in a row; COLUMN: one for each row; CHANNEL: one
            for each index of the second axis; SCALAR: one.
        view: LEFT, RIGHT: half of each row of one array (`packed`), read in place; TURNED: the transpose of an array.
        around: the mean of its values, which are normally distributed.
    """

    name: str
    shape: str = FULL
    view: str = ""
    around: float = 0.0

    def dims(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Its dimensions in a space."""
        return {
            FULL: space,
            ROW: space[-1:],
            COLUMN: (*space[:-1], 1),
            CHANNEL: (space[1] if len(space) > 1 else 1, 1),
            SCALAR: (),
        }[self.shape]

    def has_rows(self) -> bool:
        """True if it has the first axis of the space."""
        return self.shape in (FULL, COLUMN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A formula and how it is measured.

    Attributes:
        name: its name in `--entries`.
        suite: the suite to which it belongs.
        formula: the function that it computes.
        operands: its inputs, in order.
        wrt: the operands with respect to which backward differentiates; () for none.
        space: "flat": [n]; "rows": [n / w, w] with w up to 4096; "images": [n / (64 l), 64, l] with l up to 1024.
        native: the name of torch's own function for it.
        kind: the op kind that is the whole formula, with its attributes, for libraries that have it.
        in_place: the result overwrites the first operand.
        dtypes: the dtypes in which it is measured, also of its parameters.
    """

    name: str
    suite: str
    formula: Formula
    operands: tuple[Operand, ...]
    wrt: tuple[str, ...] = ()
    space: str = "flat"
    native: str = ""
    kind: tuple[str, tuple[tuple[str, str], ...]] | None = None
    in_place: bool = False
    dtypes: tuple[str, ...] = DTYPES

    @property
    def directions(self) -> tuple[str, ...]:
        """The passes that are measured."""
        return (FORWARD, BACKWARD) if self.wrt else (FORWARD,)

    def dims(self, n: int) -> tuple[int, ...]:
        """The space of about `n` elements."""
        if self.space == "flat":
            return (max(n, 1),)
        if self.space == "rows":
            width = min(4096, max(n // 4, 1))
            return max(n // width, 1), width
        length = min(1024, max(n // 64, 1))
        return max(n // (64 * length), 1), 64, length

    def steps(self) -> tuple[Step, ...]:
        """The formula, recorded."""
        return recorded(self.formula, [o.name for o in self.operands])

    def missing(self) -> str:
        """A kind of its formula that opgraph does not have (yet); empty if there is none."""
        return next((s.kind for s in self.steps() if opdef.find(s.kind) is None), "")

    def one_op(self, space: tuple[int, ...], dtype: str) -> og.Graph | None:
        """A graph of the one op that is the whole formula; None if there is none."""
        if self.kind is None:
            return None
        name, attrs = self.kind
        g = og.Graph()
        inputs = [g.input(o.name, dtype, o.dims(space)) for o in self.operands]
        more: dict[str, Any] = dict(attrs)
        g.add_op(name, *inputs, name="y", **more)
        return g.finalize()

    def graph(self, space: tuple[int, ...], dtype: str, direction: str) -> og.Graph:
        """The formula as a graph for arrays of these dimensions, finalized, result "y"; or its gradient.

        The gradient is the one that training runs. It reads what forward saves, which may be its result.
        """
        return self.plan(space, dtype).backward if direction == BACKWARD else self._forward(space, dtype)

    def plan(self, space: tuple[int, ...], dtype: str) -> TrainingPlan:
        """The graphs that training runs."""
        return training_plan(self._forward(space, dtype), self.wrt)

    def gradient(self, space: tuple[int, ...], dtype: str) -> og.Graph:
        """The gradient from operands only, regardless of what training would save at such sizes."""
        return og.gradient(self._forward(space, dtype), self.wrt)

    def _forward(self, space: tuple[int, ...], dtype: str) -> og.Graph:
        g = og.Graph()
        values = {o.name: g.input(o.name, dtype, o.dims(space)) for o in self.operands}
        steps = self.steps()
        for step in steps:
            args = [values[a] if isinstance(a, str) else a for a in step.args]
            name = "y" if step is steps[-1] else ""
            values[step.result] = _added(g, step, args, name)
        return g.finalize()


def _added(g: og.Graph, step: Step, args: list[LogicalTensor | float], name: str) -> LogicalTensor:
    """Adds the op of a step. Norms and softmax work along the last axis, as in torch."""
    attrs: dict[str, Any] = dict(step.attrs)
    if step.kind == "SoftMax":
        attrs["axis"] = -1
    elif step.kind == "LayerNorm":
        attrs |= {"begin_norm_axis": -1, "epsilon": EPSILON, "keep_stats": False}
    elif step.kind == "RMSNorm":
        attrs |= {"epsilon": EPSILON}
    made: LogicalTensor = g.add_op(step.kind, *args, name=name, **attrs)
    return made


def _of(suite: str, name: str, formula: Formula, *operands: Operand, **more: object) -> Entry:
    return Entry(name=name, suite=suite, formula=formula, operands=operands, **more)  # type: ignore[arg-type]


_X = Operand(name="x")
_R = Operand(name="r")
_W = Operand(name="w", shape=ROW, around=1.0)
#: For NAF1 near order 0.9 (opgraph/torch/naf1.py): 1 - order, 1 / gamma(2 - order), and the weights of its three terms.
_SCALARS = tuple(
    Operand(name=name, shape=SCALAR, around=middle)
    for name, middle in (("p", 0.1), ("r", 1.05), ("w0", 0.96), ("w1", -0.87), ("w2", 0.04))
)
_TRAINED = ("x", *(o.name for o in _SCALARS))

ENTRIES: tuple[Entry, ...] = (
    _of("activation", "swish", formulas.swish, _X, wrt=("x",), native="silu"),
    _of("activation", "swish, alpha 1.702", formulas.swish_quick, _X, wrt=("x",)),
    _of(
        "activation", "swish, alpha per channel", formulas.swish_alpha, _X,
        Operand(name="a", shape=CHANNEL, around=1.0), wrt=("x", "a"), space="images",
    ),
    _of(
        "activation", "swiglu", formulas.gated, Operand(name="gate"), Operand(name="up"), wrt=("gate", "up"),
        native="silu_mul",
    ),
    _of(
        "activation", "gelu", formulas.gelu, _X, wrt=("x",), native="gelu",
        kind=("GELU", (("mode", "gelu_erf"),)),
    ),
    _of(
        "activation", "gelu, tanh", formulas.gelu_tanh, _X, wrt=("x",), native="gelu_tanh",
        kind=("GELU", (("mode", "gelu_tanh"),)),
    ),
    _of("activation", "mish", formulas.mish, _X, wrt=("x",), native="mish", kind=("Mish", ())),
    _of(
        "activation", "hardswish", formulas.hard_swish, _X, wrt=("x",), native="hardswish",
        kind=("HardSwish", ()),
    ),
    _of("activation", "fractional (NAF1)", formulas.fractional, _X, *_SCALARS, wrt=_TRAINED),
    _of("chain", "chain of 12", formulas.chain_12, _X, _R, wrt=("x", "r")),
    _of("chain", "chain of 60", formulas.chain_60, _X, _R),
    _of(
        "chain", "bias + gelu", formulas.bias_gelu, _X, Operand(name="b", shape=ROW), wrt=("x",), space="rows",
        native="add_gelu",
    ),
    _of("chain", "swish + residual", formulas.residual_swish, _X, _R, wrt=("x", "r"), native="silu_add"),
    _of(
        "layout", "row and column broadcast", formulas.outer, _X, Operand(name="row", shape=ROW),
        Operand(name="column", shape=COLUMN), space="rows",
    ),
    _of(
        "layout", "glu of halves", formulas.glu, Operand(name="a", view=LEFT), Operand(name="b", view=RIGHT),
        wrt=("a", "b"), space="rows", native="glu",
    ),
    _of("layout", "transposed + residual", formulas.residual_swish, Operand(name="x", view=TURNED), _R, space="rows"),
    _of("layout", "in place", formulas.bounded, _X, _R, in_place=True, native="silu_add_clamp_"),
    _of("rows", "softmax", formulas.softmax, _X, wrt=("x",), space="rows", native="softmax"),
    _of("rows", "softmax, scaled, masked", formulas.scaled_softmax, _X, Operand(name="mask"), wrt=("x",), space="rows"),
    _of(
        "rows", "layer norm", formulas.layer_norm, _X, _W, Operand(name="b", shape=ROW), wrt=("x", "w", "b"),
        space="rows", native="layer_norm", dtypes=("f32", "bf16"),
    ),
    _of(
        "rows", "layer norm + gelu", formulas.layer_norm_gelu, _X, _W, Operand(name="b", shape=ROW), space="rows",
        native="layer_norm_gelu", dtypes=("f32", "bf16"),
    ),
    _of("rows", "rms norm", formulas.rms_norm, _X, _W, wrt=("x", "w"), space="rows", native="rms_norm"),
    _of("rows", "residual + rms norm", formulas.residual_rms_norm, _X, _R, _W, space="rows"),
)  # fmt: skip


def chosen(suites: set[str], patterns: tuple[str, ...]) -> tuple[Entry, ...]:
    """The entries of some suites whose names match one of the patterns ("swish*"); all, without a pattern.

    Raises:
        InvalidArguments: a pattern matches none of them.
    """
    found = [e for e in ENTRIES if e.suite in suites]
    for pattern in patterns:
        if not any(fnmatchcase(e.name, pattern) for e in found):
            raise InvalidArguments(
                f"no entry is called {pattern!r}", where="--entries", fix="opgraph bench --list shows them"
            )
    return tuple(e for e in found if not patterns or any(fnmatchcase(e.name, p) for p in patterns))
