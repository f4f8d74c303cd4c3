"""The arithmetic of a loop in C++: expressions for statements, values and numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from opgraph.codegen.sources import reduced_functions
from opgraph.ir import dtypes
from opgraph.ir.cxx import CxxCall
from opgraph.loops.layout import Variant
from opgraph.loops.loop import Arg, Loop, Statement
from opgraph.schedule.levels import ELEMENT, PER_ROW, Levels
from opgraph.transforms.selections import Role, role_of

if TYPE_CHECKING:
    from opgraph.codegen.shifts import Shifted

#: Function -> the kind of its derivative. A kernel with both for one argument computes their common part once: the
#: function starts with the same operations as the derivative (kernels/math/derivatives.h).
_SLOPES = {"sigmoid": "SigmoidBackward", "swish": "SwishBackward", "tanh": "TanhBackward"}
_PLAIN = {"use_dst": False, "alpha": 1.0}


class Arithmetic(Levels, ABC):
    """The statements of one loop as expressions. Subclasses define how arguments are written.

    Attributes:
        depth: length of the chain of reductions that each value depends on.
        by_lanes: true if `apply` is a template over float and og::floats.
        interleaved: true if a value of a row is an array with one element for each lane.
        told_ends: true if functions that take it get the argument `ends` (kernels/math/lanes.h).
        shifted: results of exponentials with a common base; they share its computation where `told_ends`.
        exact: quotients that are exactly 1 if an element is divided by itself.
        divisors: values of rows that have an inverse: elements are multiplied by it instead of divided.
        sloped: (kind, argument) of the derivatives whose first operations their functions may share: see `_SLOPES`.
        peaks: exponentials of the distance to the largest element of the row -> that element.
    """

    def __init__(self, loop: Loop, variant: Variant, approximate: frozenset[str], tier: str) -> None:
        super().__init__(loop, variant)
        self.approximate = approximate
        self.tier = tier
        self.positive = _powers_of_positives(loop)
        self.exact = _exact_quotients(loop, self.levels)
        self.depth = loop.depths()
        self.by_lanes = self.interleaved = self.told_ends = False
        self.shifted: dict[str, Shifted] = {}
        self.divisors: Sequence[str] = ()
        self.peaks: Mapping[str, str] = {}
        slopes = (s for s in loop.statements if s.kind in _SLOPES.values() and len(s.args) == 2)
        self.sloped = {(s.kind, s.args[0]) for s in slopes if dict(s.attrs).items() <= _PLAIN.items()}

    def identifier(self, name: str) -> str:
        """The variable that holds a value: a load's pointer x0 is read into v0."""
        return f"v{name[1:]}" if name.startswith("x") else name

    def value(self, name: str) -> str:
        """C++ for a value."""
        own = self.identifier(name)
        return f"{own}[i]" if self.interleaved and self.levels[name] == PER_ROW else own

    @abstractmethod
    def argument(self, s: Statement, place: int) -> str:
        """C++ for an argument of a statement."""

    @abstractmethod
    def literal(self, value: bool | int | float, compute: str, within: bool) -> str:
        """C++ for a number; `within` a template of lanes it is the value of all lanes."""

    def apply_type(self, dtype: str) -> str:
        """The C++ type in which `apply` computes values of a dtype."""
        compute = compute_type(dtype)
        if not self.by_lanes:
            return compute
        return "og::mask<F>" if compute == "bool" else "F"

    def in_lanes(self, text: str, compute: str) -> str:
        """A number of a type, broadcast to all lanes."""
        if not self.by_lanes or compute not in ("float", "bool"):
            return text
        return f"{'og::mask<F>' if compute == 'bool' else 'F'}({text})"

    def expression(self, s: Statement) -> str:
        """C++ for the value of a statement."""
        text = str(self.call(s))
        return f"og::round_{s.dtype}({text})" if s.rounds else text

    def call(self, s: Statement) -> CxxCall:
        """The call that computes the value of a statement, before rounding."""
        record = s.record
        compute = compute_type(s.literal_dtype(self.dtypes))
        names = [self.argument(s, place) for place in range(len(s.args))]
        within = self.by_lanes and self.levels[s.result] == ELEMENT
        if s.result in self.shifted and self.told_ends:
            return CxxCall("shifted_exp", (f"exp_{self.shifted[s.result].base}", f"shift_{s.result}", names[0], "ends"))
        if record.is_cast:
            made = _cast(names[0], self.arg_dtype(s.args[0], s.dtype), s.dtype, "F" if within else "")
        else:
            position = {"position": names.pop()} if record.by_position else {}
            inputs = {p.name: n for p, n in zip(record.with_optional(len(names)), names, strict=True)}
            made = record.cxx({**inputs, **position}, dict(s.attrs), lambda v: self.literal(v, compute, within))
        if s.result in self.positive:
            ends = ("ends",) if self.told_ends else ()
            made = CxxCall(f"positive::{made.function}", (*made.arguments, *ends))
        if s.result in self.approximate and (self.tier == "fast" or made.function in reduced_functions()):
            made = replace(made, function=made.function and f"{self.tier}::{made.function}")
        if made.arguments == (names[0],):
            made = replace(made, function=self._beside_slope(made.function, s.args[0]))
        if s.result in self.peaks:
            made = replace(made, function=f"{made.function}_of_row<near>")
        if self.row_divisor(s, made) in self.divisors:
            made = CxxCall("times", (made.arguments[0], f"{s.args[1]}_inverse"))
        return made

    def _beside_slope(self, function: str, argument: Arg) -> str:
        """The form of a function that starts like its derivative, if the loop has the derivative; else the function."""
        name = function.removeprefix("reduced::")
        own = name == function or f"{name}_beside_slope" in reduced_functions()
        return f"{function}_beside_slope" if own and (_SLOPES.get(name), argument) in self.sloped else function

    def row_divisors(self) -> list[str]:
        """The results of row reductions by which elements are divided."""
        found = dict.fromkeys(self.row_divisor(s, self.call(s)) for s in self.varying())
        return [name for name in found if name]

    def row_divisor(self, s: Statement, made: CxxCall) -> str:
        """The one by which a statement of elements divides, in f32; "" if it is not such a division."""
        if made.function not in ("div", "fast::div") or s.rounds or self.levels[s.result] != ELEMENT:
            return ""
        divisor = s.args[-1]
        is_made = isinstance(divisor, str) and self.levels[divisor] == PER_ROW and self.depth[divisor] > 0
        is_float = is_made and compute_type(self.dtypes[str(divisor)]) == "float"
        return str(divisor) if is_float and s.result not in self.exact else ""

    def arg_dtype(self, arg: Arg, fallback: str) -> str:
        """The dtype of an argument; `fallback` for a literal."""
        return self.dtypes[arg] if isinstance(arg, str) else fallback


def _cast(value: str, source: str, target: str, lanes: str) -> CxxCall:
    """A TypeCast between compute types; `lanes` stands for f32. Rounding to f16 and bf16 is added where it matters."""
    if compute_type(source) == compute_type(target):
        return CxxCall("", (value,))
    if compute_type(source) == "double" and target in ("f16", "bf16"):
        return CxxCall(f"round_{target}", (value,))  # once: not through f32
    compute = compute_type(target)
    if lanes:
        compute = f"og::mask<{lanes}>" if compute == "bool" else lanes
    return CxxCall(f"cast<{compute}>", (value,))


def storage_type(dtype: str) -> str:
    """The C++ type of a dtype in memory."""
    return dtypes.BY_NAME[dtype].storage


def compute_type(dtype: str) -> str:
    """The C++ type in which values of a dtype are computed."""
    return dtypes.BY_NAME[dtype].compute


def _exact_quotients(loop: Loop, levels: Mapping[str, int]) -> set[str]:
    """Quotients of elements and the largest element of their row (or a value made from it), if they are read by a
    function that jumps or ends at 0 or 1, such as Acos. With two products in place of the division, an element divided
    by itself might not be exactly 1.
    """
    selected: set[str] = set()
    for s in loop.statements:
        is_made_of_it = levels[s.result] == PER_ROW and not selected.isdisjoint(s.args)
        if s.row.how in ("largest", "smallest") if s.reduces else is_made_of_it:
            selected.add(s.result)
    edged: set[Arg] = set()
    for s in reversed(loop.statements if selected else ()):
        role = role_of(s.kind, s.dtype)
        keeps_sides = role & Role.KEEPS_SIDES or s.kind in ("Add", "Subtract")
        if role & Role.EDGED or (keeps_sides and s.result in edged):
            edged.update(s.args)
    return {s.result for s in loop.statements if s.kind == "Divide" and s.result in edged and s.args[-1] in selected}


def _powers_of_positives(loop: Loop) -> frozenset[str]:
    """Results of the powers and logarithms whose first operand is positive or NaN: og::positive has a form for them.

    A base is known to be positive if it is a Select of the compared value and a positive number, and the condition is a
    comparison with zero or a larger number: `where(x > 0, x, 1)`. Piecewise functions separate their powers in this
    way. A logarithm is included only if there is also a power of the same base.
    """
    made = {s.result: s for s in loop.statements}
    powers = [s for s in loop.statements if s.record.powers]
    bases = {s.args[0] for s in powers if len(s.record.inputs) > 1}
    positive = {b for b in bases if isinstance(b, str) and b in made and _is_positive(made[b], made)}
    return frozenset(s.result for s in powers if s.args[0] in positive)


def _is_positive(choice: Statement, made: dict[str, Statement]) -> bool:
    if choice.kind != "Select" or not isinstance(choice.args[0], str) or choice.args[0] not in made:
        return False
    condition, kept, other = made[choice.args[0]], choice.args[1], choice.args[2]
    above = condition.kind == "Greater" and condition.args[0] == kept and _at_least(condition.args[1], 0.0)
    return above and _at_least(other, 1e-30)


def _at_least(arg: object, least: float) -> bool:
    return isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg >= least
