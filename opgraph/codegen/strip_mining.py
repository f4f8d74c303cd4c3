"""Large kernels on the CPU, statement by statement: each one computes a strip of 256 elements before the next one runs.

One loop over many statements takes too long to compile, and has more live values than there are registers. So in a
large loop, equal statements (one kind of op, one set of attributes) become calls of one function, compiled once, and
values stay in the first caches until they are read (kernels/cpu/strip_mining.h). A call computes 16 vectors. Compared
with a function of about 20 instructions, the call costs less than constants in registers save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TypeAlias

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter
from opgraph.codegen.outlining import Function, SharedCall, SharedCalls
from opgraph.ir import dtypes
from opgraph.loops.layout import STRIDED
from opgraph.schedule.levels import ELEMENT

#: The location of a value: the type in which it is kept, and an index among the strips of that type.
Place: TypeAlias = tuple[str, int]
#: Operands that are read in their own memory.
IN_PLACE = "in place"
#: Elements of the longest and the shortest strip; strips are as long as possible with at most ROOM bytes for all.
LONGEST, SHORTEST, ROOM = 256, 64, 256 * 1024


def row_starts(emitter: Emitter) -> Iterator[str]:
    """The lines that compute the start of each operand's row: a loop compiles faster than one line per operand."""
    operands = [x.dtype for x in emitter.loop.loads] + [store.dtype for store in emitter.loop.stores]
    sizes = [dtypes.BY_NAME[dtype].itemsize for dtype in operands]
    size = str(sizes[0])
    if len(set(sizes)) > 1:
        size = "size[k]"  # not a static member: all kernels of a process would share the first kernel's
        yield f"    const unsigned char size[] = {{{', '.join(map(str, sizes))}}};"
    yield f"    for (int k = 0; k < operands; ++k) at[k] = (char*)base[k] + offset[k] * {size};"


def emit_strips(emitter: Emitter) -> None:
    """Adds a struct for each function, and `strips`, which computes elements [i, i + n): cpu/strip_mining.h calls
    them."""
    strips = _Strips(emitter)
    strips.collect()
    put = emitter.put
    put("  char* at[operands];")
    put(f"  static constexpr og::i64 strip_length = {strips.slots.length()};")
    if emitter.by_lanes:
        put("#if OG_LANES")
        put("  using Width = og::floats;")
        put("#else")
    put("  using Width = float;")
    if emitter.by_lanes:
        put("#endif")
    counts, addends = strips.slots.counts, ", Addend* sums" if emitter.sums else ""
    put(f"  using Strip = og::Strip<{sum(counts.values()) + strips.in_place}>;")
    for (function, dtype), name in strips.functions.items():
        _emit_function(emitter, function, dtype, name)
    put(f"  OG_PLAIN OG_ONCE void strips(og::i64 i, og::i64 n{addends}) const {{")
    first = dict(zip([*counts, IN_PLACE], accumulate(counts.values(), initial=0), strict=True))
    put("    Strip s;")
    put("    s.n = n;")
    for kind, count in counts.items():
        room = f"room_{kind.removeprefix('og::')}"
        put(f"    alignas(64) {kind} {room}[{count}][strip_length];")
        put(f"    og::settle(s.place + {first[kind]}, {room}[0], {count}, strip_length);")
    for head, places, tail, tag in strips.lines:
        numbers = (p if isinstance(p, str) else str(first[p[0]] + p[1]) for p in places)
        put(f"    {head}({', '.join(['s', *numbers])});{tail}", tag)
    put("  }")


def _emit_function(emitter: Emitter, function: Function, dtype: str, name: str) -> None:
    """Adds the function for a strip of a statement. Its types are the same in all calls, so it is compiled once."""
    declared, given = "", ""
    for k, (kind, d) in enumerate(zip(function.types, function.dtypes, strict=True)):
        declared += f", int a{k}" if d else f", {kind} a{k}"
        given += f", s.at<const {_slot_type(d)}>(a{k})" if d else f", a{k}"
    emitter.put(f"  struct {name} {{")
    emitter.put("    template <class F>")
    emitter.put(f"    static OG_FN {function.result} apply({function.parameters}) {{ return {function.text}; }}")
    emitter.put(f"    OG_SHARED(static void over(const Strip& s, int y{declared}),")
    emitter.put(f"      og::over<Width, {name}>(s.n, s.at<{_slot_type(dtype)}>(y){given}))")
    emitter.put("  };")


def _slot_type(dtype: str) -> str:
    """The C++ type in which a value of a dtype is kept."""
    compute = compute_type(dtype)
    return "og::b8" if compute == "bool" else compute


class _Slots:
    """Strips that hold values, by type. A strip is reused after the last read of its value."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._free: dict[str, list[Place]] = {}
        self._taken: dict[str, Place] = {}

    def take(self, name: str, dtype: str) -> Place:
        """Allocates a strip for a value."""
        kind = _slot_type(dtype)
        free = self._free.setdefault(kind, [])
        if free:
            slot = free.pop()
        else:
            slot = kind, self.counts.get(kind, 0)
            self.counts[kind] = slot[1] + 1
        self._taken[name] = slot
        return slot

    def release(self, names: Iterable[str]) -> None:
        """Ends the use of some values."""
        for name in names:
            slot = self._taken.pop(name)
            self._free[slot[0]].append(slot)

    def length(self) -> int:
        """The length of strips, in elements."""
        sizes = {"double": 8, "float": 4, "og::i64": 8, "og::i32": 4}
        each = sum(count * sizes.get(kind, 1) for kind, count in self.counts.items())
        length = LONGEST
        while length > SHORTEST and length * each > ROOM:
            length //= 2
        return length


class _Strips:
    """The calls of one functor, and the locations of values."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.functions: dict[tuple[Function, str], str] = {}
        self.lines: list[tuple[str, tuple[str | Place, ...], str, int | None]] = []
        self.in_place = 0
        self.slots = _Slots()
        self._made = SharedCalls(emitter)
        self._loads = {x.name: x for x in emitter.element_loads()}
        self._results = {store.value for store in emitter.loop.stores}
        self._place: dict[str, Place] = {}

    def collect(self) -> None:
        """Collects all calls, in the order of the statements.

        An output may alias an operand, so it is written after the last operand has been read.
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
        """Adds the loads of operands that are not loaded yet. Operands that are also results are loaded before the
        first write."""
        for name in values:
            load = self._loads.get(name)
            if load is None or name in self._place:
                continue
            slot = self._place[name] = self.slots.take(name, load.dtype)
            kept, stored = _slot_type(load.dtype), storage_type(load.dtype)
            at = f"(const {stored}*)at[{self.emitter.positions[name]}] + i"
            if self.emitter.kinds[name] == STRIDED:
                self._line(f"og::fetch<Width, {kept}>", slot, f"{at} * {name}_step", f"{name}_step")
            elif stored != kept or name in self._results:
                self._line(f"og::fetch<Width, {kept}>", slot, at)
            else:
                self._place[name] = IN_PLACE, self.in_place
                self.in_place += 1
                self._line(f"og::in_place<Width, {kept}>", self._place[name], slot, at)

    def _call(self, call: SharedCall, ends: Iterable[str], value: str = "") -> None:
        """Adds the line that computes a value. It may reuse the strip of a value that it reads last."""
        given = [self._place.get(g, g) for g in call.given]
        name = self.functions.setdefault((call.function, call.dtype), f"Op{len(self.functions)}")
        self.slots.release(ends)
        s = call.statement
        value = s.result if s is not None else value
        slot = self._place[value] = self.slots.take(value, call.dtype)
        tail, tag = (f"  // {s.kind} #{s.tag}", s.tag) if s is not None else ("", None)
        self._line(f"{name}::over", slot, *given, tail=tail, tag=tag)

    def _deliver(self, stores: Iterable[int]) -> None:
        """Adds the lines that write some results."""
        emitter = self.emitter
        for k in stores:
            value = emitter.loop.stores[k].value
            if emitter.levels[value] < ELEMENT:
                number, value = value, f"{value} everywhere"
                if value not in self._place:
                    self._call(self._made.of_number(number), (), value)
            store = emitter.loop.stores[k]
            strip, kept = self._place[value], _slot_type(emitter.dtypes[store.value])
            at = f"({storage_type(store.dtype)}*)at[{len(emitter.loop.loads) + k}] + i"
            if k in emitter.sums:
                self._line(f"og::deliver_addends<Width, {kept}>", strip, f"sums + {emitter.sums.index(k)} * og::strip")
            elif emitter.store_kinds[k] == STRIDED:
                self._line(f"og::deliver<Width, {kept}>", strip, f"{at} * y{k}_step", f"y{k}_step")
            else:
                self._line(f"og::deliver<Width, {kept}>", strip, at)

    def _line(self, head: str, *places: str | Place, tail: str = "", tag: int | None = None) -> None:
        self.lines.append((head, places, tail, tag))
