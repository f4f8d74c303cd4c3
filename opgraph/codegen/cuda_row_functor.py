"""Emitting a loop over rows for CUDA: as `opgraph.codegen.emit`, with passes. `kernels/rows.cuh` walks them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from opgraph.codegen.arithmetic import CALL, ELEMENT, PER_ROW, compute_type, storage_type
from opgraph.codegen.emit import Emitter, Functor
from opgraph.ir import dtypes, opdef
from opgraph.loops.layout import KEPT, RUN, STRIDED, Variant
from opgraph.loops.loop import Load, Loop, Statement, Store
from opgraph.loops.passes import Pass, kept_values, passes_of, row_stores


def emit_cuda_rows(loop: Loop, variant: Variant, approximate: frozenset[str]) -> Functor:
    """The functor of one variant of a loop over rows.

    Args:
        approximate: results of the statements that are computed by og::fast.
    """
    return _CudaRowEmitter(loop, variant, approximate).rows()


@dataclass(frozen=True, slots=True)
class Held:
    """What each element costs a thread that reads its row once.

    Attributes:
        loaded: bytes that the first pass loads before it computes.
        waiting: bytes that wait in registers between two passes, at most.
        added: bytes in registers for sums over rows.
        instructions: roughly, in all passes.
        is_wide: whether it is computed in f64.
    """

    loaded: int
    waiting: int
    added: int
    instructions: int
    is_wide: bool


def held_by(loop: Loop, variant: Variant, small: frozenset[str]) -> Held:
    """What an element of a row costs.

    Args:
        small: loads that do not wait in registers.
    """
    return _CudaRowEmitter(loop, variant, frozenset()).footprint(small)


class _CudaRowEmitter(Emitter):
    def __init__(self, loop: Loop, variant: Variant, approximate: frozenset[str]) -> None:
        super().__init__(loop, variant, approximate)
        self.kinds = {x.name: k for x, k in self.loads}
        self.depth = loop.depths()
        is_element = {name: level == ELEMENT for name, level in self.levels.items()}
        #: Where a row waits in registers, and where it is read again.
        self.held = passes_of(loop, is_element, keep=True)
        self.again = passes_of(loop, is_element, keep=False)
        self.kept = kept_values(self.held)
        self.per_row = row_stores(loop)
        self.divisors: list[str] = []
        self.divisors = list(dict.fromkeys(str(s.args[1]) for s in loop.statements if self.divides_a_row(s)))

    def divides_a_row(self, s: Statement) -> bool:
        """Whether elements are divided by what reductions made of their row: by a product with its inverse."""
        divisor = s.args[-1] if len(s.args) == 2 else None
        if not isinstance(divisor, str) or self.depth[divisor] == 0 or self.levels[s.result] != ELEMENT:
            return False
        is_float = compute_type(self.dtypes[divisor]) == "float" and self.levels[divisor] == PER_ROW
        operands = f"div({self.argument(s, 0)}, {divisor})"
        return is_float and super().expression(s) in (f"og::{operands}", f"og::fast::{operands}")

    def expression(self, s: Statement) -> str:
        if self.divisors and self.divides_a_row(s):
            return f"og::times({self.argument(s, 0)}, {s.args[1]}_inverse)"
        return super().expression(s)

    # -- what goes through memory and registers -----------------------------------------------------------------

    def reads_of(self, one: Pass) -> list[Load]:
        """The loads that a pass reads element by element, those without memory aside."""
        used = {a for s in (*one.statements, *one.reductions) for a in s.args if isinstance(a, str)}
        used |= {s.value for s in self.loop.stores if one.stores and not s.per_row}
        return [x for x in self.element_loads() if x.name in used and not x.is_position]

    @cached_property
    def first_read(self) -> dict[str, int]:
        """The pass of a held row that a load is first needed in."""
        found: dict[str, int] = {}
        for number, one in enumerate(self.held):
            for load in self.reads_of(one):
                found.setdefault(load.name, number)
        return found

    def fetched_in(self, name: str) -> int:
        """The pass of a held row that an operand as large as the space is loaded in: one before it is needed, so that
        it is under way while threads meet."""
        return max(self.first_read[name] - 1, 0)

    def footprint(self, small: frozenset[str]) -> Held:
        size = {x.name: dtypes.BY_NAME[x.dtype].itemsize for x in self.element_loads()}
        size |= {name: 0 for name in size if name in small or self.kinds[name] == RUN}
        waiting = [0]
        for number in range(1, len(self.held)):
            later = {x.name for one in self.held[number:] for x in self.reads_of(one)}
            loaded = sum(size[name] for name in later if self.fetched_in(name) < number)
            needed = {name for one in self.held[number:] for name in one.read}
            made = {name for one in self.held[:number] for name in one.kept}
            waiting.append(loaded + sum(_width(self.dtypes[name]) for name in needed & made))
        first = sum(size[name] for name in self.first_read if self.fetched_in(name) == 0)
        added = sum(_width("f64" if self.addend() == "double" else "f32") for k in self.sums if self.is_column(k))
        cost = sum(opdef.get(s.kind, where="a row").cost for one in self.held for s in one.statements)
        return Held(first, max(waiting), added, cost, self.addend() == "double")

    def is_column(self, store: int) -> bool:
        """Whether a sum is one for each column."""
        return self.store_kinds[store] == KEPT

    # -- text ---------------------------------------------------------------------------------------------------

    def rows(self) -> Functor:
        """The whole text."""
        self.put("struct Fused {")
        self.members()
        self.row_members()
        self.bind()
        self.hoisted("call", CALL)
        self.hoisted("row", PER_ROW)
        self.row_packs()
        self.fetching()
        self.computing()
        self.reduced()
        self.finish()
        if self.sums:
            self.total()
        self.put("};")
        return Functor("\n".join(self.lines), self.tags)

    def row_members(self) -> None:
        if not self.sums:
            self.put("  static constexpr int sums = 0;")
            self.put(f"  using Addend = {self.addend()};")
        counts = [len(p.reductions) for p in self.held]
        most, terms = max(counts), max([*counts[:-1], counts[-1] + len(self.sums)])
        self.put(f"  static constexpr int passes = {len(counts)}, most = {most}, terms = {terms};")
        chosen = "".join(f"pass == {number} ? {count} : " for number, count in enumerate(counts))
        self.put(f"  static constexpr int reductions(int pass) {{ return {chosen}0; }}")
        chosen = "".join(
            f"pass == {number} && k == {k} ? og::How::{_row(s).how} : "
            for number, p in enumerate(self.held)
            for k, s in enumerate(p.reductions)
            if _row(s).how != "add"
        )
        self.put(f"  static constexpr og::How how(int pass, int k) {{ return {chosen}og::How::add; }}")
        for i, store in self.per_row:
            self.put(f"  {storage_type(store.dtype)}* y{i};")
        for name in self.divisors:
            self.put(f"  og::Inverse {name}_inverse;")

    def row_packs(self) -> None:
        """V elements as they were loaded, and what passes keep of them for each other."""
        self.put("  template <int V> struct Packs {")
        for load in self.element_loads():
            if not load.is_position:
                length = "1" if self.kinds[load.name] == RUN else "V"
                self.put(f"    og::Pack<{storage_type(load.dtype)}, {length}> {load.name};")
        for name in self.kept:
            self.put(f"    {compute_type(self.dtypes[name])} {name}[V];")
        self.put("  };")

    def fetching(self) -> None:
        """The loads of a pass. Of a held row each happens once, those aside that are the same for many rows, and named
        by a bit of `small`: a cache has these."""
        lines: list[tuple[str, str]] = []
        for number, (one, again) in enumerate(zip(self.held, self.again, strict=True)):
            in_held, in_again = ({x.name for x in self.reads_of(p)} for p in (one, again))
            for load in self.element_loads():
                position, name = self.positions[load.name], load.name
                when = []
                if name in self.first_read and self.fetched_in(name) == number:
                    when.append(f"how == og::Reading::once && !(small >> {position} & 1)")
                if name in in_held:
                    when.append(f"how == og::Reading::cached && small >> {position} & 1")
                if name in in_again:
                    when.append("how == og::Reading::again")
                if when:
                    condition = " || ".join(f"({w})" if len(when) > 1 else w for w in when)
                    lines.append((f"pass == {number} && ({condition})", f"in.{name} = {self.fetched(load)};"))
        head = "  template <int pass, og::Reading how, unsigned long long small"
        any_of = " || ".join(f"({condition})" for condition, _ in lines)
        self.put(f"{head}> static constexpr bool fetches() {{ return {any_of or 'pass < 0'}; }}")
        self.put(f"{head}, int V> OG_FN void fetch(Packs<V>& in, og::i64 i) const {{")
        for condition, text in lines:
            self.put(f"    if constexpr ({condition}) {text}")
        self.put("  }")

    def fetched(self, load: Load) -> str:
        kind = self.kinds[load.name]
        if kind == RUN:
            return f"{{{{{load.name}[0]}}}}"
        if kind == STRIDED:
            return f"og::gather_pack<V>({load.name}, i, {load.name}_step)"
        return f"og::load_pack<V>({load.name} + i)"

    def computing(self) -> None:
        """V elements of a pass: what they add to reduction k, and after these to each sum, goes to s[k]."""
        self.put("  template <int pass, bool held, int V>")
        self.put("  OG_FN void compute(Packs<V>& in, og::i64 i, bool inside, Addend (*s)[V]) const {")
        for number, (one, again) in enumerate(zip(self.held, self.again, strict=True)):
            if (one.statements, one.read, one.kept) == (again.statements, again.read, again.kept):
                self.one_pass(one, f"pass == {number}")
            else:
                self.one_pass(one, f"pass == {number} && held")
                self.one_pass(again, f"pass == {number} && !held")
        self.put("  }")

    def one_pass(self, one: Pass, condition: str) -> None:
        if not (one.statements or one.reductions or one.stores):
            return
        self.put(f"    if constexpr ({condition}) {{")
        stores = self.elementwise() if one.stores else []
        for i, store in stores:
            self.put(f"      {compute_type(store.dtype)} r{i}[V];")
        self.put("      OG_UNROLL for (int k = 0; k < V; ++k) {")
        used = {a for s in (*one.statements, *one.reductions) for a in s.args if isinstance(a, str)}
        used |= {s.value for s in self.loop.stores if one.stores and not s.per_row}
        for load, kind in self.loads:
            if load.name in used and self.levels[load.name] == ELEMENT:
                at = "0" if kind == RUN else "k"
                text = self.read(load, kind, "(i + k)") if load.is_position else f"og::load(in.{load.name}.item[{at}])"
                self.put(f"        const {compute_type(load.dtype)} {self.value(load.name)} = {text};")
        for name in one.read:
            self.put(f"        const {compute_type(self.dtypes[name])} {name} = in.{name}[k];")
        for s in one.statements:
            text = f"const {compute_type(s.dtype)} {s.result} = {self.expression(s)};"
            self.put(f"        {text}  // {s.kind} #{s.tag}", s.tag)
        for name in one.kept:
            self.put(f"        in.{name}[k] = {name};")
        for k, s in enumerate(one.reductions):
            each = _row(s).each.format(src=self.argument(s, 0))
            self.put(f"        s[{k}][k] = {each};  // {s.kind} #{s.tag}", s.tag)
        for k, i in enumerate(self.sums if one.stores else ()):
            self.put(f"        s[{len(one.reductions) + k}][k] = {self.value(self.loop.stores[i].value)};")
        for i, store in stores:
            self.put(f"        r{i}[k] = {self.value(store.value)};")
        self.put("      }")
        for i, _ in stores:
            scattered = self.store_kinds[i] == STRIDED
            text = f"scatter_pack<V>(y{i}, i, y{i}_step, r{i})" if scattered else f"store_pack<V>(y{i} + i, r{i})"
            self.put(f"      if (inside) og::{text};")
        self.put("    }")

    def reduced(self) -> None:
        """What the reductions of a pass make of a row, and what follows from that for the row."""
        self.put("  template <int pass> OG_FN void reduced(const Addend* total, Addend count) {")
        for number, one in enumerate(self.held):
            self.put(f"    if constexpr (pass == {number}) {{")
            for k, s in enumerate(one.reductions):
                text = _row(s).total.format(total=f"total[{k}]", count="count")
                self.row_value(s, f"({compute_type(s.dtype)})({text})", rounds=s.rounds)
            for s in self.loop.statements:
                if self.levels[s.result] == PER_ROW and self.depth[s.result] == number + 1 and not s.reduces:
                    self.row_value(s, self.expression(s))
            self.put("    }")
        self.put("  }")

    def row_value(self, s: Statement, text: str, *, rounds: bool = False) -> None:
        text = f"og::round_{s.dtype}({text})" if rounds else text
        self.put(f"      {s.result} = {text};  // {s.kind} #{s.tag}", s.tag)
        if s.result in self.divisors:
            self.put(f"      {s.result}_inverse = og::inverse_of({s.result});")

    def finish(self) -> None:
        """The results of the row."""
        self.put("  OG_FN void finish() const {")
        for i, store in self.per_row:
            self.put(f"    y{i}[0] = og::store<{storage_type(store.dtype)}>({self.value(store.value)});")
        self.put("  }")

    # -- what differs from a loop without rows --------------------------------------------------------------------

    def is_hoisted(self, s: Statement) -> bool:
        return self.depth[s.result] == 0

    def elementwise(self) -> list[tuple[int, Store]]:
        return [(i, s) for i, s in super().elementwise() if not s.per_row]

    def pointers(self) -> list[tuple[int, str, str, str]]:
        n = len(self.loop.loads)
        return super().pointers() + [(n + i, f"y{i}", s.dtype, "") for i, s in self.per_row]

    def addend(self) -> str:
        reduced = [s.dtype for s in self.loop.statements if s.reduces]
        summed = [self.loop.stores[i].dtype for i in self.sums]
        return "double" if any(compute_type(d) == "double" for d in (*reduced, *summed)) else "float"


def _width(dtype: str) -> int:
    """Bytes of a value in the type that it is computed in, in a register."""
    return 8 if compute_type(dtype) in ("double", "og::i64") else 4


def _row(s: Statement) -> opdef.Row:
    row = opdef.get(s.kind, where="emit").row
    assert row is not None
    return row
