"""The common parts of all functors: their operands, their statements, and how memory is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from opgraph.codegen.arithmetic import Arithmetic, compute_type, storage_type
from opgraph.codegen.literals import literal
from opgraph.loops.layout import ADDED, GROUP, ROW, STRIDED, UNIFORM, Variant
from opgraph.loops.loop import Load, Loop, Statement, Store
from opgraph.schedule.cpu_body import Form
from opgraph.schedule.levels import ELEMENT, PER_ROW
from opgraph.schedule.reduction_passes import row_stores


@dataclass(frozen=True, slots=True)
class Functor:
    """Emitted text.

    Attributes:
        code: `struct Fused {...};`
        tags: line number within `code`, from 1 -> tag of the op that the line came from.
        form: how it iterates over elements.
    """

    code: str
    tags: Mapping[int, int]
    form: Form


@final
class Emitter(Arithmetic):
    """Collects the lines of one functor, and writes the lines common to several kinds of functors.

    Attributes:
        positions: indices of the loads.
        virtual: loads without memory: their offset is their value.
        per_row: the stores of one value for each row, with their indices.
        by_strips: see `opgraph.codegen.strip_mining`.
        calls: result of a statement -> the call of the function that computes it.
    """

    def __init__(self, loop: Loop, variant: Variant, approximate: frozenset[str] = frozenset(), tier: str = "") -> None:
        super().__init__(loop, variant, approximate, tier)
        self.positions = {x.name: i for i, x in enumerate(loop.loads)}
        self.virtual = {x.name for x in loop.loads if x.is_position}
        self.per_row = row_stores(loop)
        self.by_strips = False
        self.calls: dict[str, str] = {}
        self._lines: list[str] = []
        self._tags: dict[int, int] = {}

    def functor(self, form: Form = Form.LOOP) -> Functor:
        """Ends the struct and returns the collected lines."""
        self.put("};")
        return Functor("\n".join(self._lines), self._tags, form)

    def put(self, line: str, tag: int | None = None) -> None:
        """Adds a line that belongs to the op with that tag."""
        self._lines.append(line)
        if tag is not None:
            self._tags[len(self._lines)] = tag

    # -- operands -----------------------------------------------------------------------------------------------

    def members(self) -> None:
        """Adds the operands, and the values that are hoisted out of the innermost loop."""
        self.put(f"  static constexpr int operands = {len(self.loop.loads) + len(self.loop.stores)};")
        if self.sums or self.loop.row_axes:
            self.emit_sums()
            places = "".join(f"k == {k} ? {len(self.loop.loads) + i} : " for k, i in enumerate(self.sums))
            self.put(f"  static constexpr int sum_operand(int k) {{ return {places}-1; }}")
        for position, name, dtype, const in self.pointers():
            if self.is_named(position):
                self.put(f"  {'og::i64' if name in self.virtual else f'{const}{storage_type(dtype)}*'} {name};")
            if self.has_step(position):
                self.put(f"  og::i64 {name}_step;")
        for name, level in self.levels.items():
            if level < ELEMENT:
                declared = f"{compute_type(self.dtypes[name])} {self.identifier(name)}"
                self.put(f"  alignas(64) {declared}[og::side];" if self.each_lane(level) else f"  {declared};")

    def emit_sums(self) -> None:
        """Adds the number of sums, the type of their addends, and which of them add up the innermost axis."""
        self.put(f"  static constexpr int sums = {len(self.sums)};")
        self.put(f"  using Addend = {self.addend()};")
        added = " || ".join(f"k == {k}" for k, i in enumerate(self.sums) if self.store_kinds[i] == ADDED)
        self.put(f"  static constexpr bool adds_row(int k) {{ return {added or 'k < 0'}; }}")

    def has_step(self, position: int) -> bool:
        """True if an operand moves by a step known at run time."""
        return self.variant.operands[position] in ((STRIDED, ROW, GROUP) if self.interleaved else (STRIDED,))

    def is_named(self, position: int) -> bool:
        """True if an operand has a pointer with its name. In strips, only operands that are read before the row is
        walked have one."""
        loads = self.loop.loads
        return not self.by_strips or (position < len(loads) and self.levels[loads[position].name] != ELEMENT)

    def bind(self, more: Iterable[str] = ()) -> None:
        """Adds `move`, which sets pointers to the start of a row (base pointer plus an offset in elements) and runs the
        lines `more`; and `steps`."""
        self.put("  OG_FN void move(void* const* base, const og::i64* offset) {")
        for position, name, dtype, const in self.pointers():
            base = f"({const}{storage_type(dtype)}*)base[{position}] + " if name not in self.virtual else ""
            if self.is_named(position):
                self.put(f"    {name} = {base}offset[{position}];")
        for line in more:
            self.put(line)
        self.put("  }")
        self.put("  OG_FN void steps(const og::i64* step) {")
        for position, name, _, _ in self.pointers():
            if self.has_step(position):
                self.put(f"    {name}_step = step[{position}];")
        self.put("  }")

    def pointers(self) -> list[tuple[int, str, str, str]]:
        """Index, name, dtype and qualifier of each operand that moves."""
        loads = [(self.positions[x.name], x.name, x.dtype, "const ") for x, _ in self.loads]
        n = len(self.loop.loads)
        return loads + [(n + i, f"y{i}", s.dtype, "") for i, s in (*self.elementwise(), *self.per_row)]

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def argument(self, s: Statement, place: int) -> str:
        """C++ for an argument of a statement."""
        arg = s.args[place]
        within = self.by_lanes and self.levels[s.result] == ELEMENT
        if isinstance(arg, str):
            return self.in_apply(arg) if within else self.value(arg)
        return self.literal(arg, compute_type(s.literal_dtype(self.dtypes, place)), within)

    def literal(self, value: bool | int | float, compute: str, within: bool) -> str:
        """C++ for a number; `within` a template of lanes, where all of them have it."""
        text = literal(value, compute)
        return self.in_lanes(text, compute) if within else text

    def in_apply(self, name: str) -> str:
        """The C++ for a value within `apply`: a value known before the row is one number for all lanes."""
        if self.by_lanes and self.levels[name] < ELEMENT:
            return f"{self.apply_type(self.dtypes[name])}({self.value(name)})"
        return self.value(name)

    def hoisted(self, method: str, level: int, more: Iterable[str] = ()) -> None:
        """Adds a method that computes the values of one level, and ends with the lines `more`."""
        each = self.each_lane(level)
        self.put(f"  OG_FN void {method}({'og::i64 n' if each else ''}) {{")
        for load, kind in self.loads:
            if self.levels[load.name] == level:
                read = self.read(load, lane_of(kind), kind=STRIDED if each else UNIFORM)
                self.put(f"    {each}{self.value(load.name)} = {read};")
        for s in self.loop.statements:
            if self.levels[s.result] == level and self.depth[s.result] == 0:  # others depend on a reduction
                self.assign(s, self.expression(s))
        for line in more:
            self.put(line)
        self.put("  }")

    def assign(self, s: Statement, text: str, indent: str = "    ") -> None:
        """Adds the line that sets a value of a row or a call."""
        own = f"{self.each_lane(self.levels[s.result])}{self.value(s.result)} = {text};"
        self.put(f"{indent}{own}  // {s.kind} #{s.tag}", s.tag)

    def each_lane(self, level: int) -> str:
        """The loop in front of a statement of one level: rows side by side have one value each."""
        return "OG_VECTORIZE for (og::i64 i = 0; i < n; ++i) " if self.interleaved and level == PER_ROW else ""

    def apply(self) -> None:
        """Adds the arithmetic of one element, common to the CPU and the GPU."""
        params = [f"const {self.apply_type(x.dtype)} {self.value(x.name)}" for x in self.element_loads()]
        params += [f"{self.apply_type(s.dtype)}& r{i}" for i, s in enumerate(self.loop.stores)]
        template = "template <class F> " if self.by_lanes else ""
        self.put(f"  {template}OG_FN void apply({', '.join(params)}) const {{")
        self.statements(self.loop.statements)
        for i, store in enumerate(self.loop.stores):
            self.put(f"    r{i} = {self.in_apply(store.value)};")
        self.put("  }")

    def statements(self, statements: Iterable[Statement]) -> None:
        """Adds the lines of the statements that are computed for each element."""
        for s in statements:
            if self.levels[s.result] == ELEMENT:
                text = self.calls.get(s.result) or self.expression(s)
                self.put(f"    const {self.apply_type(s.dtype)} {s.result} = {text};  // {s.kind} #{s.tag}", s.tag)

    # -- memory -------------------------------------------------------------------------------------------------

    def read(self, load: Load, counter: str = "i", *, kind: str = "") -> str:
        """The value of a load at an element of the row; `kind`: as if it moved in that way."""
        index = index_text(counter, load.name, kind or self.kinds[load.name])
        if load.is_position:
            return f"{load.name} + {index}"
        return f"og::load({load.name}[{index}])"

    def element(self) -> None:
        """Adds `element`, which computes element i of the row; its addend for sum k goes to s[k * og::strip]."""
        self.put(f"  OG_FN void element(og::i64 i{self.addends()}) const {{")
        self.results([self.read(x) for x in self.element_loads()])
        for i, store in self.elementwise():
            self.put(f"    {self.stored(i, store)}")
        self.emit_addends()
        self.put("  }")

    def emit_addends(self) -> None:
        """Adds the lines with an element's addend for each sum."""
        for k, i in enumerate(self.sums):
            self.put(f"    s[{k} * og::strip] = r{i};")

    def stored(self, i: int, store: Store, counter: str = "i", value: str = "") -> str:
        """The line that writes a value (r<i> by default) to an element of the row."""
        place = index_text(counter, f"y{i}", self.store_kinds[i])
        return f"y{i}[{place}] = og::store<{storage_type(store.dtype)}>({value or f'r{i}'});"

    def addends(self) -> str:
        """The parameter of functions that add to sums."""
        return ", Addend* s" if self.sums else ""

    def results(self, args: list[str]) -> None:
        """Adds variables for all results, and the call that sets them."""
        for i, store in enumerate(self.loop.stores):
            self.put(f"    {compute_type(store.dtype)} r{i};")
        template = "<float>" if self.by_lanes else ""
        args += [f"r{i}" for i in range(len(self.loop.stores))]
        self.put(f"    apply{template}({', '.join(args)});")


def lane_of(kind: str) -> str:
    """The index of lane i's row value, if rows lie side by side."""
    return "(i / group)" if kind == GROUP else "i"


def index_text(counter: str, name: str, kind: str) -> str:
    """C++ for the index of element `counter` of an operand."""
    if kind == UNIFORM:
        return "0"
    return f"{counter} * {name}_step" if kind == STRIDED else counter
