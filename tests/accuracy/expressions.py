"""Random expression graphs over the whole op set, with arguments that stay in each op's domain."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from hypothesis import strategies as st

import opgraph as og
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.opdef import OpDef, all_ops
from opgraph.ops import samples

#: Elements of each input.
SIZE = 4096


def is_continuous(record: OpDef) -> bool:
    """True if small changes of the arguments cause small changes of the result, in the op's domain.

    Otherwise the last bit of an argument decides between two results, and distances from the truth are meaningless.
    """
    if record.kind not in _continuous:
        _continuous[record.kind] = _is_continuous(record)
    return _continuous[record.kind]


_continuous: dict[str, bool] = {}


def _is_continuous(record: OpDef) -> bool:
    steps = []
    for count in (1000, 10000):
        ramps = [np.linspace(*(record.domain[i] if len(record.domain) > 1 else record.domain[0]), count)
                 for i in range(len(record.inputs))]  # fmt: skip
        worst = 0.0
        for ports, attrs in samples.forms(record, "f64"):
            for moving in range(len(ports)):
                line = [r if i == moving else np.full(count, r[count // 3]) for i, r in enumerate(ramps[: len(ports)])]
                assert record.reference is not None
                result = record.reference(*line, **attrs).astype(np.float64)
                worst = max(worst, float(np.max(np.abs(np.diff(result)))))
        steps.append(worst)
    return steps[1] < 0.5 * steps[0] or steps[0] == 0


@functools.cache
def usable_ops() -> tuple[OpDef, ...]:
    """Pointwise ops over floats, without ops of index, position or layout."""
    return tuple(
        r
        for r in all_ops()
        if r.is_pointwise
        and r.index_of is None
        and not r.by_position
        and not r.channel_inputs
        and "f64" in samples.dtypes_of(r)
    )


class Builder:
    """A graph under construction, with the float64 truth of every value."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.graph = og.Graph()
        self.dtype = dtype
        rng = np.random.default_rng(seed)
        self.feeds = {n: rng.uniform(-4, 4, SIZE).astype(dtypes.get(dtype).numpy) for n in "abc"}
        self.leaves = [self.graph.input(n, dtype, (SIZE,)) for n in "abc"]
        self.values: list[LogicalTensor] = list(self.leaves)
        self.truth = {t.id: self.feeds[str(t.name)].astype(np.float64) for t in self.leaves}

    def add(self, kind: str, *args: LogicalTensor, dtype: str | None = None, **attrs: Any) -> LogicalTensor:
        made = self.graph.add_op(kind, *args, dtype=dtype, **attrs)
        assert isinstance(made, LogicalTensor)
        record = next(r for r in all_ops() if r.kind == kind)
        assert record.reference is not None
        result = record.reference(*[self.truth[t.id] for t in args], **attrs)
        target = dtypes.get(made.dtype)
        if target.category == "int":
            result = np.clip(np.trunc(result), -128, 127)
        self.truth[made.id] = result.astype(bool) if target.category == "bool" else result.astype(np.float64)
        return made

    def within(self, tensor: LogicalTensor, low: float, high: float) -> LogicalTensor:
        """The value, clamped if it leaves a range."""
        truth = self.truth[tensor.id]
        if np.all((truth >= low) & (truth <= high)):
            return tensor
        return self.add("Clamp", tensor, min=float(np.float32(low)), max=float(np.float32(high)))

    def step(self, draw: Any) -> None:
        record = draw(st.sampled_from(usable_ops()))
        ports, attrs = draw(st.sampled_from(samples.forms(record, self.dtype)))
        if record.is_cast:
            return self.cast(draw)
        boolean = record.outputs[0].type == "boolean"
        pool = self.values if not boolean and is_continuous(record) else self.leaves
        args = []
        for index, port in enumerate(ports):
            if port.type == "boolean":
                args.append(self.add("Less", *draw(st.permutations(self.leaves))[:2]))
                continue
            low, high = record.domain[index] if len(record.domain) > 1 else record.domain[0]
            # A clamped leaf is as exact as the leaf.
            args.append(self.within(draw(st.sampled_from(pool)), low, high))
        made = self.add(record.kind, *args, **attrs)
        if boolean:
            chosen = [draw(st.sampled_from(self.values)) for _ in range(2)]
            made = self.add("Select", made, *chosen)
        self.values.append(made)

    def cast(self, draw: Any) -> None:
        """Casts a value to another dtype and back: to a float dtype, or to an integer one if the argument is exact."""
        via = draw(st.sampled_from(["f16", "bf16", "f32", "s8"]))
        source = draw(st.sampled_from(self.leaves if via == "s8" else self.values))
        middle = self.add("TypeCast", self.within(source, -100.0, 100.0), dtype=via)
        self.values.append(self.add("TypeCast", middle, dtype=self.dtype))


@st.composite
def expressions(draw: Any, dtype: str) -> Builder:
    """A graph of 2 to 12 ops. The last value is its output; so is every other unused value."""
    builder = Builder(dtype, draw(st.integers(0, 99)))
    for _ in range(draw(st.integers(2, 8))):
        builder.step(draw)
    builder.graph.output(builder.values[-1])
    return builder


def peers(graph: og.Graph, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The result by NumPy, op by op, in the declared dtypes."""
    return np.asarray(og.evaluate(graph, feeds, dtype=None))


COMPOSED = {
    "swiglu with a clamp": "Multiply(Swish(Clamp(a, min=-7, max=7), alpha=1.702), Add(Clamp(b, min=-7, max=7), 1))",
    "a trainable swish": "Add(Multiply(a, Sigmoid(Multiply(b, a))), Multiply(c, Square(a)))",
    "a split by where": "Select(Greater(a, b), Multiply(Sqrt(Abs(a)), c), Subtract(Exp(b), 1))",
    "gelu far out, spelled another way": "Multiply(a, Multiply(0.5, Add(1, Tanh(Multiply(0.8, Add(a, b))))))",
    "a norm": "Divide(Subtract(a, b), Sqrt(Add(Square(c), 0.00001)))",
    "a rational": "Divide(Add(Multiply(a, Square(a)), b), Add(1, Square(c)))",
    "snake": "Add(a, Divide(Square(Sin(Multiply(a, b))), Add(Abs(b), 0.5)))",
    "softplus difference": "Subtract(SoftPlus(a), SoftPlus(b))",
    "log of a sum of exponentials": "Log(Add(Exp(a), Add(Exp(b), Exp(c))))",
    "a power": "Multiply(Sign(a), Pow(Add(Abs(a), 0.1), c))",
    "hyperbola": "Sqrt(Add(Square(a), Square(b)))",
}
