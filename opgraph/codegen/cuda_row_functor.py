"""Emitting a loop over rows for CUDA: as `opgraph.codegen.emit`, with passes. `kernels/rows.cuh` walks them."""

from __future__ import annotations

from opgraph.codegen.arithmetic import CALL, ELEMENT, PER_ROW, compute_type, storage_type
from opgraph.codegen.cuda_row_reads import RowReader
from opgraph.codegen.emit import Functor
from opgraph.codegen.row_reductions import reduction_members, row_of
from opgraph.codegen.totals import put_totals
from opgraph.loops.layout import RUN, STRIDED, Variant
from opgraph.loops.loop import Load, Loop, Statement
from opgraph.loops.passes import Pass


def emit_cuda_rows(loop: Loop, variant: Variant, approximate: frozenset[str]) -> Functor:
    """The functor of one variant of a loop over rows.

    Args:
        approximate: results of the statements that are computed by og::fast.
    """
    return _CudaRowEmitter(loop, variant, approximate).rows()


class _CudaRowEmitter(RowReader):
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
            put_totals(self)
        self.put("};")
        return Functor("\n".join(self.lines), self.tags)

    def row_members(self) -> None:
        if not self.sums:
            self.put("  static constexpr int sums = 0;")
            self.put(f"  using Addend = {self.addend()};")
        counts = [len(p.reductions) for p in self.held]
        most, terms = max(counts), max([*counts[:-1], counts[-1] + len(self.sums)])
        self.put(f"  static constexpr int passes = {len(counts)}, most = {most}, terms = {terms};")
        for line in reduction_members(self.held):
            self.put(line)
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
        # loose: bits of the operands whose packs lie anywhere.
        self.put(f"{head}, unsigned long long loose, int V> OG_FN void fetch(Packs<V>& in, og::i64 i) const {{")
        for condition, text in lines:
            self.put(f"    if constexpr ({condition}) {text}")
        self.put("  }")

    def fetched(self, load: Load) -> str:
        kind = self.kinds[load.name]
        if kind == RUN:
            return f"{{{{{load.name}[0]}}}}"
        if kind == STRIDED:
            return f"og::gather_pack<V>({load.name}, i, {load.name}_step)"
        return f"og::load_run<(loose >> {self.positions[load.name]} & 1), V>({load.name} + i)"

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
            each = row_of(s).each.format(src=self.argument(s, 0))
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
                text = row_of(s).total.format(total=f"total[{k}]", count="count")
                # Without a division's slow path more waits in registers; elsewhere that leaves less room for rows.
                if self.sums and s.result in self.approximate:
                    text = text.replace("/ count", "* og::fast::reciprocal(count)")
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
