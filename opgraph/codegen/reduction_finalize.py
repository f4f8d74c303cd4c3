"""The step from added-up values to results: a functor's members about its sums, and its `total`."""

from __future__ import annotations

from opgraph.codegen.arithmetic import compute_type, storage_type
from opgraph.codegen.emitter import Emitter


def emit_totals(emitter: Emitter) -> None:
    """Adds `total` for each sum: it writes element `at` of the result. It has a parameter `count`, the number of added
    elements, if a result depends on it.

    The number of the sum is known at compile time: if the text has all sums, a choice among them in each costs NVRTC a
    tenth of its time (the gradient of NAF1, nine sums).
    """
    put = emitter.put
    totals = [emitter.loop.stores[i].total.format(total="value", count="count") for i in emitter.sums]
    counts = any(text != "value" for text in totals)
    if counts:
        put("  static constexpr bool counts = true;")
    count = ", og::i64 count" if counts else ""
    for k, (i, text) in enumerate(zip(emitter.sums, totals, strict=True)):
        dtype = emitter.loop.stores[i].dtype
        whole = text if text == "value" else f"({text})"
        value = whole if dtype in ("f16", "bf16") else f"({compute_type(dtype)}){whole}"
        stored = f"(({storage_type(dtype)}*)y)[at] = og::store<{storage_type(dtype)}>({value});"
        put(f"  template <class T> static OG_FN void total(og::Number<{k}>, void* y, og::i64 at, T value{count}) {{")
        put(f"    {stored}")
        put("  }")
