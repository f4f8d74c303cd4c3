"""A driver of a few functions, in C: it runs the emulator's kernels, and records or refuses launches."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from opgraph.runtime.cpu_compiler import find_compiler

_TEXT = """
struct Launch { void* function; unsigned blocks, threads; void* stream; };
Launch launches[64];
int count, refused_at = -1, refused_with;
typedef int (*Run)(void**, unsigned, unsigned, int);
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
  if (gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || extra) return 1;
  if (count == refused_at) { refused_at = -1; return refused_with; }
  launches[count++] = {function, gx, bx, stream};
  return ((Run)function)(parameters, gx, bx, 0) ? 1 : 0;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR";
  return 0;
}
"""


class Launch(ctypes.Structure):
    """The record of a launch."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("blocks", ctypes.c_uint), ("threads", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
    )  # fmt: skip


class FakeDriver:
    """The library, built in a folder.

    Attributes:
        path: for `opgraph.runtime.cuda_sequence.LIBCUDA`.
    """

    def __init__(self, folder: Path) -> None:
        compiler = find_compiler()
        assert compiler is not None
        source, self.path = folder / "libcuda.cpp", str(folder / "libcuda.so")
        source.write_text(f'extern "C" {{{_TEXT}}}')
        subprocess.run([*compiler.command, "-fPIC", "-shared", "-w", "-o", self.path, str(source)], check=True)
        self._library = ctypes.CDLL(self.path)

    def launches(self) -> list[Launch]:
        """The launches since the last call of this function."""
        count = ctypes.c_int.in_dll(self._library, "count")
        found = list((Launch * 64).in_dll(self._library, "launches"))[: count.value]
        count.value = 0
        return found

    def refuse(self, number: int, code: int) -> None:
        """Makes launch `number` from now fail, once."""
        ctypes.c_int.in_dll(self._library, "count").value = 0
        ctypes.c_int.in_dll(self._library, "refused_at").value = number
        ctypes.c_int.in_dll(self._library, "refused_with").value = code
