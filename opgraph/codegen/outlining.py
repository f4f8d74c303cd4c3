"""Statements of a large kernel as calls of functions. Statements that compute the same share a function.

So each function is compiled once. CPU kernels call a function for a strip of elements
(`opgraph.codegen.strip_mining`), CUDA kernels for one element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from opgraph.codegen.arithmetic import Arithmetic, compute_type
from opgraph.codegen.emitter import Emitter
from opgraph.codegen.literals import literal
from opgraph.loops.loop import Statement
from opgraph.partition.split import MAX_COST, STATEMENT_COST
from opgraph.schedule.levels import ELEMENT

#: Fewest occurrences of a group of cheap statements that becomes one function. A function takes about 5 ms to compile.
OFTEN = 8


def is_cheap(s: Statement) -> bool:
    """True if a statement costs less than a store of its result to a cache and a load from there."""
    return s.record.cost < STATEMENT_COST


@dataclass(frozen=True, slots=True)
class Function:
    """The common function of statements that compute the same.

    Attributes:
        text: the expression, over parameters a0, a1, ...
        result: the C++ type of its value.
        types: the C++ types of the parameters.
        dtypes: the dtypes of the parameters; "" for a number that is the same for all elements.
    """

    text: str
    result: str
    types: tuple[str, ...]
    dtypes: tuple[str, ...]

    @property
    def parameters(self) -> str:
        """The declaration of the parameters."""
        return ", ".join(f"const {kind} a{k}" for k, kind in enumerate(self.types))


@dataclass(frozen=True, slots=True)
class SharedCall:
    """A call of a function.

    Attributes:
        function: the function.
        given: for each parameter the name of a value, or C++ for a number.
        dtype: the dtype of the result.
        statement: the statement that it computes; None: it broadcasts a number to all elements.
    """

    function: Function
    given: tuple[str, ...]
    dtype: str
    statement: Statement | None = None


@final
class SharedCalls(Arithmetic):
    """Statements as calls, over parameters."""

    def __init__(self, emitter: Emitter) -> None:
        super().__init__(emitter.loop, emitter.variant, emitter.approximate, emitter.tier)
        self.by_lanes = emitter.by_lanes
        self._inner: dict[str, Statement] = {}
        self._given: list[str] = []
        self._types: list[tuple[str, str]] = []
        self._is_cheap = False

    def all(self) -> list[SharedCall]:
        """The calls of the whole loop. A cheap statement with a single reader is part of that reader's function, if the
        combination occurs often enough to be worth a function."""
        statements = {s.result: s for s in self.varying()}
        readers = Counter(a for s in statements.values() for a in s.args if isinstance(a, str))
        readers.update({store.value: 2 for store in self.loop.stores})
        alone = {r: s for r, s in statements.items() if readers[r] == 1 and is_cheap(s)}
        folded: dict[str, dict[str, Statement]] = {}
        inner: set[str] = set()
        for result, s in reversed(statements.items()):
            if result not in inner and is_cheap(s):
                folded[result] = {a: alone[a] for a in s.args if isinstance(a, str) and a in alone}
                inner.update(folded[result])
        made = {r: self.of(statements[r], parts) for r, parts in folded.items() if parts}
        times = Counter(call.function for call in made.values())
        for result in [r for r, call in made.items() if times[call.function] < OFTEN]:
            inner.difference_update(folded[result])
            del made[result]
        return [made.get(r) or self.of(s, {}) for r, s in statements.items() if r not in inner]

    def of(self, s: Statement, inner: Mapping[str, Statement]) -> SharedCall:
        """The call for a statement, with the statements `inner` as parts of it."""
        self._inner = dict(inner)
        self._given, self._types = [], []
        return self._called(self._expression(s), s.dtype, s)

    def of_number(self, name: str) -> SharedCall:
        """The call that broadcasts a number to all elements."""
        self._given, self._types = [], []
        return self._called(self._value(name), self.dtypes[name])

    def _called(self, text: str, dtype: str, s: Statement | None = None) -> SharedCall:
        types, dtypes = zip(*self._types, strict=True)
        return SharedCall(Function(text, self.apply_type(dtype), types, dtypes), tuple(self._given), dtype, s)

    def _expression(self, s: Statement) -> str:
        self._is_cheap = is_cheap(s)
        return self.expression(s)

    def argument(self, s: Statement, place: int) -> str:
        """A parameter, also for a number, so that statements may differ in it."""
        arg = s.args[place]
        if isinstance(arg, str):
            return self._value(arg)
        compute = compute_type(s.literal_dtype(self.dtypes, place))
        return self._number(literal(arg, compute), compute)

    def literal(self, value: bool | int | float, compute: str, within: bool) -> str:
        """An attribute: a constant in a costly function, since a compiler optimises constants better."""
        text = literal(value, compute)
        if self._is_cheap:
            return self._number(text, compute)
        return self.in_lanes(text, compute) if within else text

    def _value(self, name: str) -> str:
        """A parameter for a value, or for a number that is the same for the whole row."""
        if self.levels[name] != ELEMENT:
            return self._number(self.value(name), compute_type(self.dtypes[name]))
        part = self._inner.pop(name, None)
        kind = self.apply_type(self.dtypes[name])
        return (
            f"{kind}({self._expression(part)})" if part is not None else self._parameter(name, kind, self.dtypes[name])
        )

    def _number(self, text: str, compute: str) -> str:
        return self.in_lanes(self._parameter(text, compute), compute)

    def _parameter(self, given: str, kind: str, dtype: str = "") -> str:
        self._given.append(given)
        self._types.append((kind, dtype))
        return f"a{len(self._given) - 1}"


def emit_functions(emitter: Emitter) -> dict[str, str]:
    """Adds the functions of a CUDA kernel that several costly statements share. Returns the call for each statement."""
    if emitter.cost <= MAX_COST:
        return {}
    made = SharedCalls(emitter)
    calls = {s.result: made.of(s, {}) for s in emitter.varying() if not is_cheap(s)}
    times = Counter(call.function for call in calls.values())
    names = {function: f"f{k}" for k, (function, count) in enumerate(times.items()) if count > 1}
    for function, name in names.items():
        emitter.put(f"  static OG_SLOW {function.result} {name}({function.parameters}) {{ return {function.text}; }}")
    found = {}
    for value, call in calls.items():
        if call.function in names:
            given = (emitter.value(g) if g in emitter.levels else g for g in call.given)
            found[value] = f"{names[call.function]}({', '.join(given)})"
    return found
