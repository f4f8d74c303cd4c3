"""The arithmetic of a loop in C++: what a statement, a value and a number are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from opgraph.codegen.literals import literal
from opgraph.codegen.positive import powers_of_positives
from opgraph.codegen.sources import brief_functions
from opgraph.ir import dtypes, opdef
from opgraph.loops.layout import CONTIGUOUS, GROUP, ROW, RUN, STRIDED, UNIFORM, Variant
from opgraph.loops.loop import Arg, Loop, Statement

if TYPE_CHECKING:
    from opgraph.codegen.shifts import Shifted

#: When a value changes: once a call, once a row, with every element.
CALL, PER_ROW, ELEMENT = 0, 1, 2
_LEVEL = {UNIFORM: CALL, ROW: PER_ROW, GROUP: PER_ROW, RUN: ELEMENT, CONTIGUOUS: ELEMENT, STRIDED: ELEMENT}


class Arithmetic:
    """The statements of one loop as expressions.

    Attributes:
        loop: what is computed.
        variant: how its operands move.
        dtypes: of all values.
        loads: the loads that something reads, and how they move. (Others shape the iteration space alone.)
        levels: name of a value -> when it changes.
        by_lanes: whether `apply` is a template over float and og::floats.
        told_ends: whether functions that ask for it are told `ends` (kernels/lanes.h).
        shifted: results of exponentials that share their base, which is done where `told_ends`.
    """

    def __init__(self, loop: Loop, variant: Variant, approximate: frozenset[str], tier: str = "fast") -> None:
        self.loop = loop
        self.variant = variant
        self.approximate = approximate
        self.tier = tier
        self.positive = powers_of_positives(loop)
        self.dtypes = loop.dtype_of()
        used = loop.reads()
        self.loads = [(x, k) for x, k in zip(loop.loads, variant.operands) if x.name in used]
        self.levels: dict[str, int] = {x.name: _LEVEL[k] for x, k in self.loads}
        for s in loop.statements:
            level = max((self.levels[a] for a in s.args if isinstance(a, str)), default=CALL)
            self.levels[s.result] = PER_ROW if s.reduces else level
        self.by_lanes = False
        self.told_ends = False
        self.shifted: Mapping[str, Shifted] = {}

    @property
    def cost(self) -> int:
        """Instructions of one element, by the records."""
        return sum(opdef.get(s.kind, where="codegen").cost for s in self.varying())

    def varying(self) -> list[Statement]:
        """The statements whose values are another one for each element."""
        return [s for s in self.loop.statements if self.levels[s.result] == ELEMENT]

    def value(self, name: str) -> str:
        """The identifier that holds a value: a load's pointer x0 is read into v0."""
        return f"v{name[1:]}" if name.startswith("x") else name

    def apply_type(self, dtype: str) -> str:
        """The C++ type that `apply` computes values of a dtype in."""
        compute = compute_type(dtype)
        if not self.by_lanes:
            return compute
        return "og::mask<F>" if compute == "bool" else "F"

    def in_apply(self, name: str) -> str:
        """The C++ for a value within `apply`: what is known before the row is one number for all lanes."""
        if self.by_lanes and self.levels[name] < ELEMENT:
            return f"{self.apply_type(self.dtypes[name])}({self.value(name)})"
        return self.value(name)

    def expression(self, s: Statement) -> str:
        """C++ for the value of a statement."""
        record = opdef.get(s.kind, where="emit")
        compute = compute_type(s.literal_dtype(self.dtypes))
        names = [self.argument(s, place) for place in range(len(s.args))]
        attrs = dict(s.attrs)
        within = self.by_lanes and self.levels[s.result] == ELEMENT
        if record.is_cast:
            text = _cast(names[0], self.arg_dtype(s.args[0], s.dtype), s.dtype, "F" if within else "")
        else:
            position = {"position": names.pop()} if record.by_position else {}
            ports = record.with_optional(len(names))
            inputs = {p.name: n for p, n in zip(ports, names, strict=True)}
            text = record.cxx({**inputs, **position}, attrs, lambda v: self.literal(v, compute, within))
        if s.result in self.shifted and self.told_ends:
            text = f"og::shifted_exp(exp_{self.shifted[s.result].base}, shift_{s.result}, {names[0]}, ends)"
        if s.result in self.approximate:
            text = _by_tier(text, self.tier)
        if s.result in self.positive:
            space = "og::fast::" if s.result in self.approximate and self.tier == "fast" else "og::"
            text = text.replace(space, f"{space}positive::", 1)
            if self.told_ends:
                text = text.removesuffix(")") + ", ends)"
        return f"og::round_{s.dtype}({text})" if s.rounds else text

    def arg_dtype(self, arg: Arg, fallback: str) -> str:
        """The dtype of an argument; `fallback` for a literal."""
        return self.dtypes[arg] if isinstance(arg, str) else fallback

    def argument(self, s: Statement, place: int) -> str:
        """C++ for an argument of a statement."""
        arg = s.args[place]
        within = self.by_lanes and self.levels[s.result] == ELEMENT
        if isinstance(arg, str):
            return self.in_apply(arg) if within else self.value(arg)
        return self.literal(arg, compute_type(s.literal_dtype(self.dtypes, place)), within)

    def literal(self, value: bool | int | float, compute: str, within: bool) -> str:
        """A number; `within` a template of lanes, where all of them have it."""
        text = literal(value, compute)
        if not within or compute not in ("float", "bool"):
            return text
        return f"{'og::mask<F>' if compute == 'bool' else 'F'}({text})"


def _cast(value: str, source: str, target: str, lanes: str) -> str:
    """A TypeCast between compute types; rounding to f16 and bf16 is added where it counts; `lanes` stands for f32."""
    if compute_type(source) == compute_type(target):
        return value
    if compute_type(source) == "double" and target in ("f16", "bf16"):
        return f"og::round_{target}({value})"  # once: not through f32
    compute = compute_type(target)
    if lanes:
        compute = f"og::mask<{lanes}>" if compute == "bool" else lanes
    return f"og::cast<{compute}>({value})"


def _by_tier(text: str, tier: str) -> str:
    """An expression by another namespace: a GPU's with all that is in it, the CPU's where that has the function."""
    if tier == "fast":
        return text.replace("og::", "og::fast::")
    return text.replace("og::", "og::brief::", 1) if text[4:].partition("(")[0] in brief_functions() else text


def storage_type(dtype: str) -> str:
    """The C++ type of a dtype in memory."""
    return dtypes.BY_NAME[dtype].storage


def compute_type(dtype: str) -> str:
    """The C++ type that values of a dtype are computed in."""
    return dtypes.BY_NAME[dtype].compute
