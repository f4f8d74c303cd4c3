"""Emitting a loop as C++: the functor that changes from kernel to kernel; skeletons and arithmetic are in `kernels/`.

The text is a pure value: it depends on the loop and the variant alone, so one loop is one text in every process. No
name of a model reaches it: operands are x0, x1, ..., values t0, t1, ..., results y0, y1, ..., and each statement ends
with the kind and position of the op that it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opgraph.codegen.arithmetic import CALL, ELEMENT, PER_ROW, Arithmetic, compute_type, storage_type
from opgraph.codegen.branches import branches_of, put_branches
from opgraph.codegen.halves import put_halves
from opgraph.codegen.lanes import goes_by_lanes, put_lanes
from opgraph.codegen.packs import put_packs
from opgraph.codegen.rolled import put_rolled
from opgraph.codegen.shared import put_functions
from opgraph.codegen.shifts import put_shift_members, put_shifts
from opgraph.codegen.strips import goes_by_strips, is_named, put_rows, put_strips
from opgraph.codegen.totals import put_totals
from opgraph.codegen.turned import put_turned
from opgraph.loops.layout import ADDED, KEPT, STRIDED, UNIFORM, Variant
from opgraph.loops.loop import Load, Loop, Statement, Store


@dataclass(frozen=True, slots=True)
class Functor:
    """Emitted text.

    Attributes:
        code: `struct Fused {...};`
        tags: line number within `code`, from 1 -> tag of the op that the line came from.
    """

    code: str
    tags: Mapping[int, int]


def emit_functor(
    loop: Loop, variant: Variant, *, packs: bool, rolled: bool = False, approximate: frozenset[str] = frozenset()
) -> Functor:
    """The functor of one kernel variant: its operands, its arithmetic, and how an element is loaded and stored.

    Args:
        packs: with `fetch` and `finish`, which move packs (CUDA); else with `lanes`, for 16 floats at a time, where all
            arithmetic is in f32, and `element`, which the CPU's compiler vectorises.
        rolled: with `group`, for a few elements of a pack at a time.
        approximate: results of the statements that are computed by og::fast, on the CPU by og::brief.
    """
    return Emitter(loop, variant, approximate, "fast" if packs else "brief").functor(packs, rolled)


class Emitter(Arithmetic):
    """Collects lines of one functor."""

    def __init__(self, loop: Loop, variant: Variant, approximate: frozenset[str], tier: str = "fast") -> None:
        super().__init__(loop, variant, approximate, tier)
        self.positions = {x.name: i for i, x in enumerate(loop.loads)}
        #: Loads without memory: their offset is their value.
        self.virtual = {x.name for x in loop.loads if x.is_position}
        self.store_kinds = variant.operands[len(loop.loads) :]
        self.sums = [i for i, kind in enumerate(self.store_kinds) if kind in (ADDED, KEPT)]
        self.lines: list[str] = []
        self.tags: dict[int, int] = {}
        self.by_strips = False
        self.calls: dict[str, str] = {}  # result of a statement -> the call of a function that makes it

    def functor(self, packs: bool, rolled: bool = False) -> Functor:
        """The whole text."""
        self.by_lanes = not packs and goes_by_lanes(self)
        strips = self.by_strips = not packs and goes_by_strips(self)
        branches = branches_of(self) if self.by_lanes and not strips else None
        if branches:
            self.shifted = branches.shifted
        self.put("struct Fused {")
        self.members()
        self.bind()
        self.hoisted("call", CALL)
        self.hoisted("row", PER_ROW)
        self.calls = put_functions(self) if packs else {}
        if strips:
            put_strips(self)
        elif branches:
            put_branches(self, branches)
        else:
            self.apply()
            self.element()
        if self.sums:
            put_totals(self)
        if packs:
            put_packs(self)
            if rolled:
                put_rolled(self)
        else:
            put_turned(self)
            if not branches and not strips:
                put_halves(self)
                if self.by_lanes:
                    put_lanes(self)
        self.put("};")
        return Functor("\n".join(self.lines), self.tags)

    def put(self, line: str, tag: int | None = None) -> None:
        """Adds a line, of the op with that tag."""
        self.lines.append(line)
        if tag is not None:
            self.tags[len(self.lines)] = tag

    # -- operands -----------------------------------------------------------------------------------------------

    def members(self) -> None:
        """Operands, and the values that leave the innermost loop."""
        self.put(f"  static constexpr int operands = {len(self.loop.loads) + len(self.loop.stores)};")
        if self.sums:
            self.put(f"  static constexpr int sums = {len(self.sums)};")
            self.put(f"  using Addend = {self.addend()};")
            added = " || ".join(f"k == {k}" for k, i in enumerate(self.sums) if self.store_kinds[i] == ADDED)
            self.put(f"  static constexpr bool adds_row(int k) {{ return {added or 'k < 0'}; }}")
            places = "".join(f"k == {k} ? {len(self.loop.loads) + i} : " for k, i in enumerate(self.sums))
            self.put(f"  static constexpr int sum_operand(int k) {{ return {places}-1; }}")
        for position, name, dtype, const in self.pointers():
            if is_named(self, position):
                self.put(f"  {'og::i64' if name in self.virtual else f'{const}{storage_type(dtype)}*'} {name};")
            if self.variant.operands[position] == STRIDED:
                self.put(f"  og::i64 {name}_step;")
        for name, level in self.levels.items():
            if level < ELEMENT:
                self.put(f"  {compute_type(self.dtypes[name])} {self.value(name)};")
        put_shift_members(self)

    def bind(self) -> None:
        """Pointers at the start of a row: base pointer plus an offset in elements."""
        self.put("  OG_FN void move(void* const* base, const og::i64* offset) {")
        for position, name, dtype, const in self.pointers():
            base = f"({const}{storage_type(dtype)}*)base[{position}] + " if name not in self.virtual else ""
            if is_named(self, position):
                self.put(f"    {name} = {base}offset[{position}];")
        if self.by_strips:
            put_rows(self)
        self.put("  }")
        self.put("  OG_FN void steps(const og::i64* step) {")
        for position, name, _, _ in self.pointers():
            if self.variant.operands[position] == STRIDED:
                self.put(f"    {name}_step = step[{position}];")
        self.put("  }")

    def pointers(self) -> list[tuple[int, str, str, str]]:
        """Place, name, dtype and qualifier of each operand that moves."""
        loads = [(self.positions[x.name], x.name, x.dtype, "const ") for x, _ in self.loads]
        n = len(self.loop.loads)
        return loads + [(n + i, f"y{i}", s.dtype, "") for i, s in self.elementwise()]

    def elementwise(self) -> list[tuple[int, Store]]:
        """The stores of one value for each element, with their places."""
        return [(i, s) for i, s in enumerate(self.loop.stores) if i not in self.sums]

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def hoisted(self, method: str, level: int) -> None:
        """A method that computes the values of one level."""
        self.put(f"  OG_FN void {method}() {{")
        for load, _ in self.loads:
            if self.levels[load.name] == level:
                self.put(f"    {self.value(load.name)} = {self.read(load, UNIFORM)};")
        for s in self.loop.statements:
            if self.levels[s.result] == level and self.is_hoisted(s):
                self.put(f"    {s.result} = {self.expression(s)};  // {s.kind} #{s.tag}", s.tag)
        put_shifts(self, level)
        self.put("  }")

    def is_hoisted(self, s: Statement) -> bool:
        """Whether a value that is none of an element's is known before the row is walked."""
        return True

    def apply(self) -> None:
        """One element: what the CPU and the GPU have in common."""
        params = [f"const {self.apply_type(x.dtype)} {self.value(x.name)}" for x in self.element_loads()]
        params += [f"{self.apply_type(s.dtype)}& r{i}" for i, s in enumerate(self.loop.stores)]
        template = "template <class F> " if self.by_lanes else ""
        self.put(f"  {template}OG_FN void apply({', '.join(params)}) const {{")
        self.statements(self.loop.statements)
        for i, store in enumerate(self.loop.stores):
            self.put(f"    r{i} = {self.in_apply(store.value)};")
        self.put("  }")

    def statements(self, statements: Iterable[Statement]) -> None:
        """The lines of those that are computed for each element."""
        for s in statements:
            if self.levels[s.result] == ELEMENT:
                text = self.calls.get(s.result) or self.expression(s)
                self.put(f"    const {self.apply_type(s.dtype)} {s.result} = {text};  // {s.kind} #{s.tag}", s.tag)

    # -- memory -------------------------------------------------------------------------------------------------

    def element_loads(self) -> list[Load]:
        """The loads that each element reads."""
        return [x for x, _ in self.loads if self.levels[x.name] == ELEMENT]

    def read(self, load: Load, kind: str, counter: str = "i") -> str:
        """The value of a load at an element of the row."""
        index = index_text(counter, load.name, kind)
        if load.is_position:
            return f"{load.name} + {index}"
        return f"og::load({load.name}[{index}])"

    def element(self) -> None:
        """Element i of the row; what it adds to sum k goes to s[k * og::strip]."""
        self.put(f"  OG_FN void element(og::i64 i{self.addends()}) const {{")
        kinds = {x.name: k for x, k in self.loads}
        args = [self.read(x, kinds[x.name]) for x in self.element_loads()]
        self.results(args, "    ")
        for i, store in self.elementwise():
            self.put(f"    {self.stored(i, store)}")
        self.put_addends()
        self.put("  }")

    def put_addends(self) -> None:
        """What an element adds to each sum."""
        for k, i in enumerate(self.sums):
            self.put(f"    s[{k} * og::strip] = r{i};")

    def stored(self, i: int, store: Store, counter: str = "i", value: str = "") -> str:
        """The line that writes a result, r<i> if not told, to an element of the row."""
        place = index_text(counter, f"y{i}", self.store_kinds[i])
        return f"y{i}[{place}] = og::store<{storage_type(store.dtype)}>({value or f'r{i}'});"

    def addends(self) -> str:
        """The parameter of what adds something to sums."""
        return ", Addend* s" if self.sums else ""

    def addend(self) -> str:
        """The type that addends of all sums have."""
        return "double" if any(compute_type(self.loop.stores[i].dtype) == "double" for i in self.sums) else "float"

    def results(self, args: list[str], indent: str) -> None:
        """Variables for all results, and the call that fills them."""
        for i, store in enumerate(self.loop.stores):
            self.put(f"{indent}{compute_type(store.dtype)} r{i};")
        template = "<float>" if self.by_lanes else ""
        results = [f"r{i}" for i in range(len(self.loop.stores))]
        self.put(f"{indent}apply{template}({', '.join([*args, *results])});")


def index_text(counter: str, name: str, kind: str) -> str:
    """C++ for the place of element `counter` of an operand."""
    if kind == UNIFORM:
        return "0"
    return f"{counter} * {name}_step" if kind == STRIDED else counter
