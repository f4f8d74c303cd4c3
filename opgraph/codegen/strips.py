"""Large kernels on the CPU, statement by statement: each does a strip of 256 elements before the next one's turn.

One loop over many statements takes a C++ compiler longer than it may, and has more values alive than there are
registers. So where a loop is large, equal statements (one kind of op, one set of attributes) become calls of one
function, compiled once, and values wait for their readers in the first caches (kernels/strips.h). A call does 16
vectors: what it takes beside a function of some 20 instructions is less than what constants in registers give back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from opgraph.codegen.arithmetic import ELEMENT, compute_type, storage_type
from opgraph.codegen.shared import Function, SharedCall, SharedCalls
from opgraph.loops.layout import STRIDED
from opgraph.partition.split import MAX_COST, STATEMENT_COST

if TYPE_CHECKING:
    from opgraph.codegen.emit import Emitter

#: The same as MAX_COST for kernels not of f32 alone, whose loop the compiler has to vectorise: 0.45 s.
WIDE_COST = 600
#: Elements of the longest strip, and of the shortest; the longest of which all strips together take at most ROOM bytes.
LONGEST, SHORTEST, ROOM = 256, 64, 256 * 1024


def goes_by_strips(emitter: Emitter) -> bool:
    """Whether one loop over all statements would take a compiler too long, and strips are no slower."""
    by_position = any(x.is_position for x in emitter.element_loads())
    most = MAX_COST if emitter.by_lanes else WIDE_COST
    return emitter.cost > max(most, STATEMENT_COST * len(emitter.varying()) - 1) and not by_position


def put_strips(emitter: Emitter) -> None:
    """Adds what kernels/strips.h asks for: a struct for each function, and `strips`, which does elements [i, i + n)."""
    strips = _Strips(emitter)
    strips.collect()
    put = emitter.put
    put(f"  static constexpr og::i64 strip_length = {strips.slots.length()};")
    if emitter.by_lanes:
        put("#if OG_LANES")
        put("  using Width = og::floats;")
        put("#else")
    put("  using Width = float;")
    if emitter.by_lanes:
        put("#endif")
    for (function, dtype), name in strips.functions.items():
        _put_function(emitter, function, dtype, name)
    put(f"  OG_PLAIN OG_ONCE void strips(og::i64 i, og::i64 n{emitter.addends()}) const {{")
    for kind, count in strips.slots.counts.items():
        put(f"    alignas(64) {kind} {_room(kind)}[{count}][strip_length];")
    for line, tag in strips.lines:
        put(f"    {line}", tag)
    put("  }")


def _put_function(emitter: Emitter, function: Function, dtype: str, name: str) -> None:
    """Adds what does a strip of a statement; its types are the same for all calls, so it is compiled once."""
    kinds = [
        f"const {_slot_type(d)}*" if d else f"const {t}" for t, d in zip(function.types, function.dtypes, strict=True)
    ]
    given = "".join(f", a{k}" for k in range(len(kinds)))
    declared = "".join(f", {kind} a{k}" for k, kind in enumerate(kinds))
    emitter.put(f"  struct {name} {{")
    emitter.put("    template <class F>")
    emitter.put(f"    static OG_FN {function.result} apply({function.parameters}) {{ return {function.text}; }}")
    emitter.put(f"    static OG_ONCE void over(og::i64 n, {_slot_type(dtype)}* y{declared}) {{")
    emitter.put(f"      og::over<Width, {name}>(n, y{given});")
    emitter.put("    }")
    emitter.put("  };")


def _slot_type(dtype: str) -> str:
    """What a value of a dtype is kept as."""
    compute = compute_type(dtype)
    return "og::b8" if compute == "bool" else compute


def _room(kind: str) -> str:
    return f"room_{kind.removeprefix('og::')}"


class _Slots:
    """Strips that values are kept in, by type; one serves others when its value has been read for the last time."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._free: dict[str, list[str]] = {}
        self._taken: dict[str, tuple[str, str]] = {}

    def take(self, name: str, dtype: str) -> str:
        """A strip for a value."""
        kind = _slot_type(dtype)
        free = self._free.setdefault(kind, [])
        if free:
            slot = free.pop()
        else:
            slot = f"{_room(kind)}[{self.counts.get(kind, 0)}]"
            self.counts[kind] = self.counts.get(kind, 0) + 1
        self._taken[name] = (kind, slot)
        return slot

    def release(self, names: Iterable[str]) -> None:
        """Ends the use of some values."""
        for name in names:
            kind, slot = self._taken.pop(name)
            self._free[kind].append(slot)

    def length(self) -> int:
        """How long strips are."""
        sizes = {"double": 8, "float": 4, "og::i64": 8, "og::i32": 4}
        each = sum(count * sizes.get(kind, 1) for kind, count in self.counts.items())
        length = LONGEST
        while length > SHORTEST and length * each > ROOM:
            length //= 2
        return length


class _Strips:
    """The calls of one functor, and where values are."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.functions: dict[tuple[Function, str], str] = {}
        self.lines: list[tuple[str, int | None]] = []
        self.slots = _Slots()
        self._made = SharedCalls(emitter)
        self._loads = {x.name: x for x in emitter.element_loads()}
        self._kinds = {x.name: kind for x, kind in emitter.loads}
        self._results = {store.value for store in emitter.loop.stores}
        self._place: dict[str, str] = {}

    def collect(self) -> None:
        """All calls, in the order of the statements.

        An output may lie in an operand's place, so it is written once the last operand has been read.
        """
        calls, stores = self._made.all(), self.emitter.loop.stores
        made = {call.statement.result: place for place, call in enumerate(calls) if call.statement}
        read = {name: place for place, call in enumerate(calls) for name in call.given}
        after = max((place for name, place in read.items() if name in self._loads), default=0)
        due: dict[int, list[int]] = {}
        for k, store in enumerate(stores):
            due.setdefault(max(made.get(store.value, len(calls)), after), []).append(k)
        kept = {stores[k].value: place for place, ready in due.items() for k in ready}
        ends: dict[int, list[str]] = {}
        ends_after: dict[int, list[str]] = {}
        for name in [*self._loads, *made]:
            last, until = read.get(name, made.get(name, -1)), kept.get(name, -1)
            (ends if until < last and name in read else ends_after).setdefault(max(last, until), []).append(name)
        self._fetch(store.value for store in stores)
        for place, call in enumerate(calls):
            self._fetch(call.given)
            self._call(call, ends.get(place, ()))
            self._deliver(due.get(place, ()))
            self.slots.release(ends_after.get(place, ()))
        self._deliver(due.get(len(calls), ()))

    def _fetch(self, values: Iterable[str]) -> None:
        """Brings operands that are yet to be brought; those that are results too, before anything is written."""
        for name in values:
            load = self._loads.get(name)
            if load is None or name in self._place:
                continue
            slot = self._place[name] = self.slots.take(name, load.dtype)
            stored = storage_type(load.dtype)
            if self._kinds[name] == STRIDED:
                self._line(f"og::fetch<Width>({slot}, {name} + i * {name}_step, {name}_step, n);")
            elif stored != _slot_type(load.dtype) or name in self._results:
                self._line(f"og::fetch<Width>({slot}, {name} + i, n);")
            else:
                value = self._place[name] = self.emitter.value(name)
                self._line(f"const {stored}* {value} = og::in_place<Width>({slot}, {name} + i, n);")

    def _call(self, call: SharedCall, ends: Iterable[str], value: str = "") -> None:
        """The line that computes a value; it may take the strip of what it reads last."""
        given = [self._place.get(g, g) for g in call.given]
        name = self.functions.setdefault((call.function, call.dtype), f"Op{len(self.functions)}")
        self.slots.release(ends)
        s = call.statement
        value = s.result if s is not None else value
        slot = self._place[value] = self.slots.take(value, call.dtype)
        text = f"{name}::over({', '.join(['n', slot, *given])});"
        self._line(*((f"{text}  // {s.kind} #{s.tag}", s.tag) if s is not None else (text,)))

    def _deliver(self, stores: Iterable[int]) -> None:
        """Writes some results."""
        emitter = self.emitter
        for k in stores:
            value = emitter.loop.stores[k].value
            if emitter.levels[value] < ELEMENT:
                number, value = value, f"{value} everywhere"
                if value not in self._place:
                    self._call(self._made.of_number(number), (), value)
            strip = self._place[value]
            if k in emitter.sums:
                self._line(f"og::deliver_addends<Width>(s + {emitter.sums.index(k)} * og::strip, {strip}, n);")
            elif emitter.store_kinds[k] == STRIDED:
                self._line(f"og::deliver<Width>(y{k} + i * y{k}_step, {strip}, y{k}_step, n);")
            else:
                self._line(f"og::deliver<Width>(y{k} + i, {strip}, n);")

    def _line(self, text: str, tag: int | None = None) -> None:
        self.lines.append((text, tag))
