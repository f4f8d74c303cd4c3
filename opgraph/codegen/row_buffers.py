"""A loop over rows on the CPU: its passes, and the buffers that keep values for a later one."""

from __future__ import annotations

from typing import final

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter
from opgraph.loops.layout import CONTIGUOUS
from opgraph.schedule.levels import ELEMENT
from opgraph.schedule.reduction_passes import ROUNDING, kept_values, passes_of
from opgraph.schedule.schedule import GROUPS, PERSISTENT_INNER


@final
class Rows:
    """A loop over rows, with its passes.

    Attributes:
        emitter: the emitter of the loop.
        passes, again: the passes if values are kept, and if each pass recomputes them; equal if none is recomputed.
        kept: the values that are kept.
        place: the result in whose memory the only kept value is stored until the last pass.
        fits: true if there is room for the kept values in every call of the kernel.
        is_persistent: true if a row is in a few vectors (persistent inner reduction).
        counter: the C++ name of the index of the current element.
    """

    def __init__(self, emitter: Emitter, schedule: str, *, fits: bool) -> None:
        self.emitter = emitter
        self.is_persistent = schedule == PERSISTENT_INNER
        self.counter = "at" if schedule in GROUPS else "i"
        is_element = {name: level == ELEMENT for name, level in emitter.levels.items()}
        self.passes = passes_of(emitter.loop, is_element, keep=True, rounding=ROUNDING)
        self.again = passes_of(emitter.loop, is_element, keep=False)
        self.kept = kept_values(self.passes)
        self.place = self._result_to_wait_in()
        self.fits = fits and self.place is None and bool(self.kept)
        if self.place is not None or self.fits or self.is_persistent:
            self.again = self.passes

    def _result_to_wait_in(self) -> int | None:
        """A result whose memory may hold the kept value. It has the type of the value, and no later pass reads operands
        element by element, since the result may alias one of them. A persistent row keeps the value in registers."""
        if len(self.kept) != 1 or self.is_persistent:
            return None
        (name,) = self.kept
        emitter = self.emitter
        made = next(n for n, p in enumerate(self.passes) if name in p.kept)
        used = {name for p in self.passes[made + 1 :] for name in p.reads(emitter.loop)}
        if any(x.name in used for x in emitter.element_loads()):
            return None
        compute = compute_type(emitter.dtypes[name])
        fitting = (
            i
            for i, s in emitter.elementwise()
            if emitter.store_kinds[i] == CONTIGUOUS
            and storage_type(s.dtype) == compute
            and compute in ("float", "double")
        )
        return next(fitting, None)

    def along(self) -> list[str]:
        """The results whose elements are contiguous."""
        return [f"y{i}" for i, _ in self.emitter.elementwise() if self.emitter.store_kinds[i] == CONTIGUOUS]

    def waiting(self, name: str) -> str:
        """The C++ pointer to the values of the row that are kept for a later pass."""
        return f"b_{name}" if self.place is None else f"y{self.place}"


def emit_buffers(rows: Rows) -> None:
    """Adds the buffers of values that are kept for a later pass."""
    put, kept = rows.emitter.put, rows.kept if rows.place is None else ()
    sizes = [compute_type(rows.emitter.dtypes[name]) for name in kept]
    put(f"  static constexpr og::i64 kept_bytes = {' + '.join(f'sizeof({t})' for t in sizes) or '0'};")
    put(f"  static constexpr bool fits = {'true' if rows.fits else 'false'};")
    for name, compute in zip(kept, sizes, strict=True):
        put(f"  {compute}* b_{name};")
    put("  OG_FN void keep(char* memory, og::i64 room, og::i64 at) {")
    for k, (name, compute) in enumerate(zip(kept, sizes, strict=True)):
        before = " + ".join(f"sizeof({t})" for t in sizes[:k]) or "0"
        put(f"    b_{name} = ({compute}*)(memory + room * ({before})) + at;")
    put("  }")
