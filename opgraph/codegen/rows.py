"""Emitting a loop over rows for the CPU: as `opgraph.codegen.emit`, with passes. `kernels/host_rows.h` walks them."""

from __future__ import annotations

from opgraph.codegen.arithmetic import CALL, ELEMENT, PER_ROW, compute_type, storage_type
from opgraph.codegen.emit import Functor
from opgraph.codegen.lanes import goes_by_lanes
from opgraph.codegen.over_rows import OverRows
from opgraph.codegen.row_ahead import put_next_members, put_nexts
from opgraph.codegen.row_passes import put_passes
from opgraph.codegen.row_reductions import reduction_members, row_of
from opgraph.codegen.totals import put_totals
from opgraph.ir import dtypes
from opgraph.loops.layout import CONTIGUOUS, RUN, UNIFORM, Variant
from opgraph.loops.loop import Loop, Statement
from opgraph.loops.passes import kept_values, passes_of


def emit_rows(loop: Loop, variant: Variant) -> Functor:
    """The functor of one variant of a loop over rows."""
    return RowEmitter(loop, variant).rows()


class RowEmitter(OverRows):
    """Collects lines of one functor."""

    def __init__(self, loop: Loop, variant: Variant) -> None:
        super().__init__(loop, variant, frozenset())
        self.at_once = variant.vectors > 0
        #: Which element of the operands is at hand.
        self.counter = "at" if variant.grouped else "i"
        is_element = {name: level == ELEMENT for name, level in self.levels.items()}
        self.passes = passes_of(loop, is_element, keep=True)
        self.again = passes_of(loop, is_element, keep=False)
        self.kept = kept_values(self.passes)
        #: The result in whose place the one value that is kept waits for the last pass.
        self.place = self.result_to_wait_in()
        if self.place is not None:
            self.again = self.passes
        self.by_lanes = self.takes_lanes()
        #: Exponentials of the distance to the largest element of the row -> that element.
        self.peaks = self.peaks_of() if self.by_lanes else {}
        self.divisors: list[str] = []
        self.divisors = self.divisors_of()

    def takes_lanes(self) -> bool:
        """Whether elements are done 16 at a time where the machine has that."""
        return goes_by_lanes(self) and all(compute_type(self.dtypes[name]) == "float" for name in self.kept)

    def divisors_of(self) -> list[str]:
        """Floats, one for each row, that elements are divided by: by a product with what is worked out once a row."""
        found: dict[str, None] = {}
        for s in self.loop.statements:
            if self.levels[s.result] == ELEMENT and self.expression(s) == self.quotient(s):
                found[str(s.args[1])] = None
        return list(found)

    def peaks_of(self) -> dict[str, str]:
        """What Exp(v - ReduceMax(v)) is called, and the largest element."""
        made = {s.result: s for s in self.loop.statements}
        found = {}
        for s in self.loop.statements:
            if s.kind != "Exp" or self.levels[s.result] != ELEMENT:
                continue
            distance = made.get(str(s.args[0]))
            if distance is None or distance.kind != "Subtract" or distance.rounds:
                continue
            largest = made.get(str(distance.args[1]))
            if largest is not None and largest.kind == "ReduceMax" and largest.args[0] == distance.args[0]:
                found[s.result] = largest.result
        return found

    def quotient(self, s: Statement) -> str:
        """The text of a division by what reductions made of a row; "" if it is none."""
        divisor = s.args[-1]
        if len(s.args) != 2 or not isinstance(divisor, str) or self.depth[divisor] == 0:
            return ""
        is_float = compute_type(self.dtypes[divisor]) == "float" and self.levels[divisor] == PER_ROW
        return f"og::div({self.argument(s, 0)}, {self.argument(s, 1)})" if is_float else ""

    def expression(self, s: Statement) -> str:
        """As of elements; a division by a value of the row is a product."""
        text = super().expression(s)
        divisor = s.args[-1] if s.args else None
        if divisor in self.divisors and text == self.quotient(s) and self.levels[s.result] == ELEMENT:
            return f"og::times({self.argument(s, 0)}, {divisor}_inverse)"
        if s.result in self.peaks:
            return text.replace("og::exp(", "og::exp_of_row<near>(", 1)
        return text

    def result_to_wait_in(self) -> int | None:
        """A result that a kept value may lie in: of its type, and no later pass reads operands, one of which it may
        lie over, element by element. What is done at once keeps it in registers."""
        if len(self.kept) != 1 or self.at_once:
            return None
        (name,) = self.kept
        made = next(n for n, p in enumerate(self.passes) if name in p.kept)
        used = {a for p in self.passes[made + 1 :] for s in (*p.statements, *p.reductions) for a in s.args}
        if self.passes[-1].stores:
            used |= {s.value for s in self.loop.stores if not s.per_row}
        if any(self.levels[x.name] == ELEMENT and x.name in used for x in self.loop.loads if x.name in self.levels):
            return None
        compute = compute_type(self.dtypes[name])
        fitting = (
            i
            for i, s in self.elementwise()
            if self.store_kinds[i] == CONTIGUOUS and storage_type(s.dtype) == compute and compute in ("float", "double")
        )
        return next(fitting, None)

    def rows(self) -> Functor:
        """The whole text."""
        self.put("struct Fused {")
        self.members()
        self.row_members()
        self.bind()
        self.buffers()
        self.hoisted("call", CALL)
        self.hoisted("row", PER_ROW)
        self.run()
        put_passes(self)
        self.reduced()
        self.finish()
        put_totals(self)
        self.put("};")
        return Functor("\n".join(self.lines), self.tags)

    def members(self) -> None:
        """Operands, and the values that leave the innermost loop."""
        super().members()
        if not self.sums:
            self.put("  static constexpr int sums = 0;")
            self.put(f"  using Addend = {self.addend()};")
            self.put("  static constexpr bool adds_row(int) { return false; }")

    def row_members(self) -> None:
        """Passes, what each reduces, and what there is one of for each run or row."""
        counts = [len(p.reductions) for p in self.passes]
        self.put(f"  static constexpr int passes = {len(self.passes)}, most = {max(counts)};")
        self.put(f"  static constexpr bool stores = {'true' if self.passes[-1].stores else 'false'};")
        for line in reduction_members(self.passes, self.ways()):
            self.put(line)
        for load, kind in self.loads:
            if kind == RUN:
                self.put(f"  {compute_type(load.dtype)} {self.value(load.name)};")
        self.per_row_members()

    def ways(self) -> dict[str, str]:
        """How some reductions are made, where there is a better way than their records'."""
        return dict.fromkeys(self.peaks.values(), "peak")

    def per_row_members(self) -> None:
        """What there is one of for each row, besides values."""
        put_next_members(self)
        for name in self.divisors:
            self.put(f"  og::Inverse {name}_inverse;")
        for name in dict.fromkeys(self.peaks.values()):
            self.put(f"  bool {name}_near;")

    def bind(self) -> None:
        """Pointers at the start of a row, and how far it is to the next one."""
        super().bind()
        put_nexts(self)

    def along(self) -> list[str]:
        """The results whose elements are neighbours."""
        return [f"y{i}" for i, _ in self.elementwise() if self.store_kinds[i] == CONTIGUOUS]

    def buffers(self) -> None:
        """Where values are kept for a later pass."""
        kept = self.kept if self.place is None else ()
        sizes = [dtypes.BY_NAME[self.dtypes[name]].compute for name in kept]
        self.put(f"  static constexpr og::i64 kept_bytes = {' + '.join(f'sizeof({t})' for t in sizes) or '0'};")
        for name, compute in zip(kept, sizes, strict=True):
            self.put(f"  {compute}* b_{name};")
        self.put("  OG_FN void keep(char* memory, og::i64 room, og::i64 at) {")
        for k, (name, compute) in enumerate(zip(kept, sizes, strict=True)):
            before = " + ".join(f"sizeof({t})" for t in sizes[:k]) or "0"
            self.put(f"    b_{name} = ({compute}*)(memory + room * ({before})) + at;")
        self.put("  }")

    def run(self) -> None:
        """What changes with the runs of a row."""
        self.put("  OG_FN void run() {")
        for load, kind in self.loads:
            if kind == RUN:
                self.put(f"    {self.value(load.name)} = {self.read(load, UNIFORM)};")
        self.put("  }")

    def reduced(self) -> None:
        """What the reductions of a pass make of a row, and what follows from that for the row."""
        self.put("  template <int pass, class Totals> OG_FN void reduced(const Totals& total, double count) {")
        for number, one in enumerate(self.passes):
            self.put(f"    if constexpr (pass == {number}) {{")
            for k, s in enumerate(one.reductions):
                total = self.total_of(s, f"total({k})")
                self.put(f"      {s.result} = {total};  // {s.kind} #{s.tag}", s.tag)
                self.inverse(s)
                if s.result in self.peaks.values():
                    self.put(f"      {s.result}_near = og::all_near(total({k}));")
            for s in self.loop.statements:
                is_here = self.levels[s.result] == PER_ROW and self.depth[s.result] == number + 1
                if is_here and not s.reduces:
                    self.put(f"      {s.result} = {self.expression(s)};  // {s.kind} #{s.tag}", s.tag)
                    self.inverse(s)
            self.put("    }")
        self.put("  }")

    def total_of(self, s: Statement, total: str) -> str:
        """What a reduction makes of its total."""
        text = row_of(s).total.format(total=total, count="count")
        compute = compute_type(s.dtype)
        narrow = text if s.dtype in ("f16", "bf16") and s.rounds else f"({compute}){_in_brackets(text)}"
        return f"og::round_{s.dtype}({narrow})" if s.rounds else narrow

    def inverse(self, s: Statement) -> None:
        """What elements are multiplied by instead of being divided."""
        if s.result in self.divisors:
            self.put(f"      {s.result}_inverse = og::inverse_of({s.result});")

    def finish(self) -> None:
        """The results of the row."""
        self.put("  OG_FN void finish() const {")
        for i, store in self.per_row:
            storage = storage_type(store.dtype)
            self.put(f"    y{i}[0] = og::store<{storage}>({self.value(store.value)});")
        self.put("  }")


def _in_brackets(text: str) -> str:
    return f"({text})" if " " in text else text
