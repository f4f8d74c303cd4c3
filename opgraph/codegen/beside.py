"""Emitting a loop over rows that are walked side by side: `opgraph.codegen.rows`, with lanes that are rows.

A value for each row is an array of one for each lane. `kernels/host_beside.h` walks them.
"""

from __future__ import annotations

from dataclasses import replace

from opgraph.codegen.arithmetic import CALL, ELEMENT, PER_ROW, compute_type, storage_type
from opgraph.codegen.emit import Functor
from opgraph.codegen.rows import RowEmitter
from opgraph.loops.layout import ADDED, CONTIGUOUS, GROUP, ROW, RUN, STRIDED, TURNED, UNIFORM, Variant
from opgraph.loops.loop import Loop, Statement


def emit_beside(loop: Loop, variant: Variant) -> Functor:
    """The functor of one variant of a loop over rows that lie side by side."""
    return _BesideEmitter(loop, variant).rows()


class _BesideEmitter(RowEmitter):
    def __init__(self, loop: Loop, variant: Variant) -> None:
        self.turned = [i for i, kind in enumerate(variant.operands) if kind == TURNED]
        super().__init__(loop, replace(variant, operands=variant.operands.replace(TURNED, CONTIGUOUS)))
        self.divisors = []

    def takes_lanes(self) -> bool:
        return False

    def divisors_of(self) -> list[str]:
        return []  # lanes are divided by vectors

    def ways(self) -> dict[str, str]:
        return {}  # each lane adds up a row by itself, in doubles

    def value(self, name: str) -> str:
        """A value for each row is that of the lane."""
        own = super().value(name)
        return f"{own}[i]" if self.levels.get(name) == PER_ROW else own

    def members(self) -> None:
        n = len(self.loop.loads)
        self.put(f"  static constexpr int operands = {n + len(self.loop.stores)}, sums = {len(self.sums)};")
        self.put(f"  using Addend = {self.addend()};")
        added = " || ".join(f"k == {k}" for k, i in enumerate(self.sums) if self.store_kinds[i] == ADDED)
        self.put(f"  static constexpr bool adds_row(int k) {{ return {added or 'k < 0'}; }}")
        items = [storage_type(x.dtype) for x in self.loop.loads] + [storage_type(s.dtype) for s in self.loop.stores]
        sizes = "".join(f"k == {i} ? (int)sizeof({items[i]}) : " for i in self.turned)
        self.put(f"  static constexpr int turned(int k) {{ return {sizes}0; }}")
        self.put(f"  static constexpr int loads = {n};")
        if self.variant.grouped:
            places = " || ".join(f"k == {i}" for i, kind in enumerate(self.variant.operands) if kind == GROUP)
            self.put(f"  static constexpr bool per_group(int k) {{ return {places or 'k < 0'}; }}")
            places = " || ".join(f"k == {i}" for i in self.moving())
            self.put(f"  static constexpr bool moves(int k) {{ return {places or 'k < 0'}; }}")
            has_runs = any(kind == RUN and self.levels[x.name] == ELEMENT for x, kind in self.loads)
            self.put(f"  static constexpr bool runs = {'true' if has_runs else 'false'};")
            self.put("  og::i64 group;")
            self.put("  OG_FN void ahead(og::i64 at) const {")
            for load in self.element_loads():
                if self.kinds[load.name] == CONTIGUOUS and not load.is_position:
                    self.put(f"    og::fetch({load.name} + at);")
            self.put("  }")
        for position, name, dtype, const in self.pointers():
            self.put(f"  {'og::i64' if name in self.virtual else f'{const}{storage_type(dtype)}*'} {name};")
            if self.has_step(position):
                self.put(f"  og::i64 {name}_step;")
        for name, level in self.levels.items():
            if level == CALL:
                self.put(f"  {compute_type(self.dtypes[name])} {self.value(name)};")
            if level == PER_ROW:
                plain = self.value(name).removesuffix("[i]")
                self.put(f"  alignas(64) {compute_type(self.dtypes[name])} {plain}[og::side];")

    def per_row_members(self) -> None:
        """Their pointers are members already."""

    def moving(self) -> list[int]:
        """The places of operands of which each element is another one."""
        of_elements = [self.positions[x.name] for x in self.element_loads() if self.kinds[x.name] != RUN]
        return of_elements + [len(self.loop.loads) + i for i, _ in self.elementwise()]

    def has_step(self, position: int) -> bool:
        """Whether an operand moves from lane to lane by a step of its own."""
        n = len(self.loop.loads)
        kind = self.store_kinds[position - n] if position >= n else self.kinds[self.loop.loads[position].name]
        return kind in (STRIDED, ROW, GROUP)

    def bind(self) -> None:
        self.put("  OG_FN void move(void* const* base, const og::i64* offset) {")
        for position, name, dtype, const in self.pointers():
            base = f"({const}{storage_type(dtype)}*)base[{position}] + " if name not in self.virtual else ""
            self.put(f"    {name} = {base}offset[{position}];")
        self.put("  }")
        self.put("  OG_FN void steps(const og::i64* step) {")
        for position, name, _, _ in self.pointers():
            if self.has_step(position):
                self.put(f"    {name}_step = step[{position}];")
        self.put("  }")

    def hoisted(self, method: str, level: int) -> None:
        each = level == PER_ROW
        self.put(f"  OG_FN void {method}({'og::i64 n' if each else ''}) {{")
        for load, kind in self.loads:
            if self.levels[load.name] == level:
                read = self.read(load, STRIDED if each else UNIFORM, "(i / group)" if kind == GROUP else "i")
                self.put(f"    {_lanes(each)}{self.value(load.name)} = {read};")
        for s in self.loop.statements:
            if self.levels[s.result] == level and self.is_hoisted(s):
                self.statement(s, each)
        self.put("  }")

    def statement(self, s: Statement, each: bool, text: str = "") -> None:
        """A value that is none of an element's."""
        own = text or self.expression(s)
        self.put(f"    {_lanes(each)}{self.value(s.result)} = {own};  // {s.kind} #{s.tag}", s.tag)

    def reduced(self) -> None:
        self.put("  template <int pass> OG_FN void reduced(const double (*total)[og::side], double count, og::i64 n) {")
        for number, one in enumerate(self.passes):
            self.put(f"    if constexpr (pass == {number}) {{")
            for k, s in enumerate(one.reductions):
                self.statement(s, True, self.total_of(s, f"total[{k}][i]"))
            for s in self.loop.statements:
                is_here = self.levels[s.result] == PER_ROW and self.depth[s.result] == number + 1
                if is_here and not s.reduces:
                    self.statement(s, True)
            self.put("    }")
        self.put("  }")

    def finish(self) -> None:
        self.put("  OG_FN void finish(og::i64 n) const {")
        for i, store in self.per_row:
            stored = f"og::store<{storage_type(store.dtype)}>({self.value(store.value)})"
            lane = "(i / group)" if self.store_kinds[i] == GROUP else "i"
            self.put(f"    {_lanes(True)}y{i}[{lane} * y{i}_step] = {stored};")
        self.put("  }")

    def run(self) -> None:
        self.put("  OG_FN void run() {")
        for load, kind in self.loads:
            if kind == RUN and self.levels[load.name] == ELEMENT:
                self.put(f"    {self.value(load.name)} = {self.read(load, UNIFORM)};")
        self.put("  }")


def _lanes(each: bool) -> str:
    return "OG_VECTORIZE for (og::i64 i = 0; i < n; ++i) " if each else ""
