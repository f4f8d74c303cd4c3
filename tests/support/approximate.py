"""Possible results of a GPU for f16 and bf16, on a CPU: cuda/fast_math.h, each instruction off by its largest error.

Many loops are compiled into one library; each kernel runs over arrays of one length, element by element. The CPU's own
switch flushes subnormals, as `-ftz=true` does: results of all f32 arithmetic, and for bf16 arguments too. (The host's
conversion of f16 passes through f32 subnormals, unlike a GPU's, so arguments are not flushed there.)
"""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from opgraph.codegen.emit import emit_functor
from opgraph.codegen.sources import kernel_folder, spliced
from opgraph.ir import dtypes
from opgraph.loops.layout import Variant
from opgraph.loops.loop import Loop
from opgraph.runtime.cpu_compiler import find_compiler
from opgraph.schedule.fast_math import approximate

#: The switch is in a register that only x86-64 has under this name.
is_possible = find_compiler() is not None and platform.machine() == "x86_64"

_BEFORE = """\
static struct { unsigned x, y, z; } blockIdx, threadIdx;
static void __syncthreads() {}
static double corner[8];
static unsigned seed;
extern "C" void choose(const double* to, unsigned with) {
  for (int i = 0; i < 8; ++i) corner[i] = to[i];
  seed = with;
}
static inline double moved(int which, unsigned bits) {
  unsigned h = (bits ^ (unsigned)which * 0x9e3779b9u) * seed;
  h = (h ^ (h >> 15)) * 0x2c1b3c6du;
  h ^= h >> 12;
  return seed == 0 ? corner[which] : (h & 1u ? 1.0 : -1.0);
}
#define OG_ERROR(which, bits) moved(which, bits)
"""
_ENTRY = """
namespace n{index} {{
{functor}
__attribute__((noinline)) void loop(const Fused f, og::i64 n) {{ for (og::i64 i = 0; i < n; ++i) f.element(i); }}
extern "C" void run{index}(void* const* base, og::i64 n, unsigned flush) {{
  og::i64 offset[Fused::operands] = {{}};
  Fused f;
  f.move(base, offset);
  f.call();
  f.row();
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | flush);
  loop(f, n);
  __builtin_ia32_ldmxcsr(before);
}}
}}
"""
_FLUSH_RESULTS, _FLUSH_ARGUMENTS = 0x8000, 0x0040
#: In the order of og::approx: the shift of each instruction's result, relative to its largest error.
ERRORS: tuple[tuple[str, tuple[float, ...], int], ...] = (
    ("none", (0.0,) * 6, 0),
    *((f"ex2 {a:+}, the others {b:+}", (a, b, b, b, b, b), 0) for a in (1.0, -1.0) for b in (1.0, -1.0)),
    ("either way, at random", (0.0,) * 6, 12345),
    ("either way, at random again", (0.0,) * 6, 987654321),
)


def names() -> set[str]:
    """The functions of og that og::fast has in its own form."""
    text = "".join(
        (kernel_folder() / f).read_text(encoding="utf-8") for f in ("cuda/fast_math.h", "cuda/fast_derivatives.h")
    )
    return set(re.findall(r"^(?:template <class T> )?OG_FN (?:float|T) (\w+)\(", text, re.MULTILINE))


def functor(loop: Loop) -> str:
    """The functor of a loop as CUDA receives it, with every operand contiguous."""
    variant = Variant("c" * (len(loop.loads) + len(loop.stores)), True)
    return emit_functor(loop, variant, packs=True, approximate=approximate(loop, variant)).code


def is_changed(loop: Loop) -> bool:
    """True if the loop calls a function that og::fast has in its own form."""
    return bool(set(re.findall(r"og::fast::(\w+)\(", functor(loop))) & names())


class Library:
    """Loops, compiled together, with additional flags of the compiler."""

    def __init__(self, loops: Sequence[Loop], more: Sequence[str] = ()) -> None:
        compiler = find_compiler()
        assert compiler is not None
        entries = [_ENTRY.format(index=i, functor=functor(loop)) for i, loop in enumerate(loops)]
        self.loops = loops
        self._folder = tempfile.TemporaryDirectory(prefix="opgraph-approximate-")
        source, made = (Path(self._folder.name) / name for name in ("all.cpp", "all.so"))
        source.write_text(_BEFORE + spliced("cuda/pointwise.cuh") + "".join(entries))
        flags = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-w", "-fPIC", "-shared")
        subprocess.run([*compiler.command, *flags, *more, "-o", str(made), str(source)], check=True)
        self._library = ctypes.CDLL(str(made))

    def results(self, index: int, arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, list[np.ndarray]]]:
        """Yields, for each choice of errors, its name and the results of loop `index` for arrays of one length."""
        loop = self.loops[index]
        size = len(arrays[0])
        flush = _FLUSH_RESULTS | (_FLUSH_ARGUMENTS if any(x.dtype == "bf16" for x in loop.loads) else 0)
        given = [np.ascontiguousarray(a) for a in arrays]
        for name, corner, seed in ERRORS:
            outs = [np.empty(size, dtypes.get(s.dtype).numpy) for s in loop.stores]
            self._library.choose((ctypes.c_double * 8)(*corner), ctypes.c_uint(seed))
            addresses = [a.ctypes.data for a in (*given, *outs)]
            base = (ctypes.c_void_p * len(addresses))(*addresses)
            self._library[f"run{index}"](base, ctypes.c_int64(size), ctypes.c_uint(flush))
            yield name, outs
