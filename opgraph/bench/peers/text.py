"""Formulas as text: for numexpr, for torch's jiterator (C++), and for Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opgraph.bench.entries import Entry
from opgraph.bench.formula import Step
from opgraph.bench.peers.peer import Refused

#: Operators that all of them write in the same way.
OPERATORS = {
    "Add": "({} + {})", "Subtract": "({} - {})", "Multiply": "({} * {})", "Divide": "({} / {})", "Neg": "(-{})",
    "Greater": "({} > {})", "Less": "({} < {})", "LessOrEqual": "({} <= {})",
}  # fmt: skip
NUMEXPR = {
    **OPERATORS,
    "Sigmoid": "(one / (one + exp(-{})))", "Tanh": "tanh({})", "Exp": "exp({})", "SoftPlus": "log1p(exp({}))",
    "Sqrt": "sqrt({})", "Abs": "abs({})", "Pow": "({} ** {})", "Select": "where({}, {}, {})",
    "Clamp": "where({0} < {min}, {min}, where({0} > {max}, {max}, {0}))",
}  # fmt: skip
#: `T` is the type in which the jiterator computes.
CXX = {
    **OPERATORS,
    "Sigmoid": "(T(1) / (T(1) + exp(-{})))", "Tanh": "tanh({})", "Exp": "exp({})", "Erf": "erf({})",
    "SoftPlus": "log1p(exp({}))", "Sqrt": "sqrt({})", "Abs": "fabs({})", "Pow": "pow({}, {})",
    "Select": "({} ? {} : {})", "Clamp": "min(max({0}, {min}), {max})",
}  # fmt: skip
TRITON = {
    **OPERATORS,
    "Sigmoid": "tl.sigmoid({})", "Tanh": "(2.0 * tl.sigmoid(2.0 * {}) - 1.0)", "Exp": "tl.exp({})",
    "Erf": "tl.erf({})", "SoftPlus": "tl.log(1.0 + tl.exp({}))", "Sqrt": "tl.sqrt({})", "Abs": "tl.abs({})",
    "Pow": "tl.exp({1} * tl.log({0}))", "Select": "tl.where({}, {}, {})",
    "Clamp": "tl.minimum(tl.maximum({0}, {min}), {max})",
}  # fmt: skip

#: The maximum number of characters: numexpr parses a value's text again at each use of the value.
LONGEST = 20_000


def written(step: Step, spelling: Mapping[str, str], values: Mapping[str, str], number: str = "{!r}") -> str:
    """The text of one step.

    Args:
        values: the text of each value that it reads.
        number: the format of a number.

    Raises:
        Refused: the spelling does not have its kind.
    """
    form = spelling.get(step.kind)
    if form is None:
        raise Refused(f"has no {step.kind}")
    args = [values[a] if isinstance(a, str) else number.format(a) for a in step.args]
    return form.format(*args, **{name: number.format(v) for name, v in step.attrs})


def expression(entry: Entry, spelling: Mapping[str, str], number: str = "{!r}") -> str:
    """The whole formula as one expression of its inputs.

    Raises:
        Refused: the spelling does not have the kind of a step, or the expression is too long to parse.
    """
    values = {o.name: o.name for o in entry.operands}
    for step in entry.steps():
        values[step.result] = written(step, spelling, values, number)
        if len(values[step.result]) > LONGEST:
            raise Refused("its expression is too long")
    return values[entry.steps()[-1].result]


def statements(entry: Entry, spelling: Mapping[str, str], number: str = "{!r}") -> list[tuple[str, str]]:
    """The formula as assignments: name, text.

    Raises:
        Refused: the spelling does not have the kind of a step.
    """
    names = {o.name: o.name for o in entry.operands} | {s.result: s.result for s in entry.steps()}
    return [(step.result, written(step, spelling, names, number)) for step in entry.steps()]


def cxx_function(entry: Entry) -> str:
    """A C++ template of the formula, for torch.cuda.jiterator."""
    kinds = {s.result: s.kind for s in entry.steps()}
    parameters = ", ".join(f"T {o.name}" for o in entry.operands)
    lines = []
    for name, text in statements(entry, CXX, "T({!r})"):
        is_condition = kinds[name] in ("Greater", "Less", "LessOrEqual")
        lines.append(f"  {'bool' if is_condition else 'T'} {name} = {text};")
    return _joined([f"template <typename T> T fused({parameters}) {{", *lines, f"  return {_last(entry)};", "}"])


def triton_module(entry: Entry) -> str:
    """A Python module with a Triton kernel `fused` over flat arrays; operands that broadcast are read by position."""
    pointers = ", ".join(f"p_{o.name}" for o in entry.operands)
    # Whole arrays are addressed by a 64-bit start and 32-bit offsets, as is usual for more than 2^31 elements.
    where = {
        "full": "p_{} + start + lane, mask", "row": "p_{} + i % width, mask", "column": "p_{} + i // width, mask",
        "channel": "p_{} + i // width % channels, mask", "scalar": "p_{}",
    }  # fmt: skip
    loads = [f"    {o.name} = tl.load({where[o.shape].format(o.name)}).to(tl.float32)" for o in entry.operands]
    steps = [f"    {name} = {text}" for name, text in statements(entry, TRITON)]
    return _joined([
        "import triton",
        "import triton.language as tl",
        "",
        "",
        "@triton.jit",
        f"def fused({pointers}, out, size, width, channels, BLOCK: tl.constexpr):",
        "    start = tl.program_id(0).to(tl.int64) * BLOCK",
        "    lane = tl.arange(0, BLOCK)",
        "    i = start + lane",
        "    mask = i < size",
        *loads,
        *steps,
        f"    tl.store(out + start + lane, {_last(entry)}.to(out.dtype.element_ty), mask)",
    ])  # fmt: skip


def _last(entry: Entry) -> str:
    return entry.steps()[-1].result


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
