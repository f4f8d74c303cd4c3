"""A fake libcuda.so.1: contexts, modules and launches, on the CPU.

It has only the functions that kernels/cuda/driver.h loads: a library that calls others, to wait or copy, would not
load. A module is the image itself, and has the functions whose names are in it. A launch calls a Python function.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

from opgraph.runtime.cpu_compiler import find_compiler

_TEXT = r"""
#include <string.h>
typedef unsigned long word;
int fake_init, fake_version = 13000, fake_major = 9, fake_minor, fake_load, fake_loads;
char fake_image[8];
void* fake_current;
static void* before[8];
static int depth;
static char names[4096][32];
static int known;
void (*fake_launch)(const char* name, unsigned grid, unsigned block, void* stream, void** arguments);

int cuInit(unsigned flags) { return fake_init; }
int cuDriverGetVersion(int* version) { *version = fake_version; return 0; }
int cuGetErrorName(int error, const char** name) {
  *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : 0;
  return *name ? 0 : 1;
}
int cuCtxGetCurrent(void** context) { *context = fake_current; return 0; }
int cuCtxPushCurrent_v2(void* context) { before[depth++] = fake_current; fake_current = context; return 0; }
int cuCtxPopCurrent_v2(void** context) { *context = fake_current; fake_current = before[--depth]; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return fake_current ? 0 : 201; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? fake_major : fake_minor;
  return attribute == 75 || attribute == 76 ? 0 : 1;
}
/* A stream is 1000 beyond its context. */
int cuStreamGetCtx(char* stream, void** context) { *context = stream - 1000; return 0; }

static word size_of(const char* image) {
  if (memcmp(image, "\177ELF", 4)) return strlen(image);
  word sections;
  memcpy(&sections, image + 40, 8);
  return sections + *(const unsigned short*)(image + 58) * *(const unsigned short*)(image + 60);
}
int cuModuleLoadData(const char** module, const char* image) {
  if (!fake_current) return 201;
  if ((word)image % 8) return 1;
  ++fake_loads;
  if (fake_load) return fake_load;
  *module = image;
  const int is_cubin = !memcmp(image, "\177ELF", 4);
  memcpy(fake_image, is_cubin ? "cubin" : "ptx", 6);
  fake_image[7] = is_cubin ? image[48 + 1] : 0; /* e_flags: the architecture, in the second byte */
  return 0;
}
int cuModuleGetFunction(char** function, const char* module, const char* name) {
  const word length = strlen(name), size = size_of(module);
  for (word i = 0; i + length <= size; ++i) {
    if (!memcmp(module + i, name, length)) {
      strcpy(*function = names[known++], name);
      return 0;
    }
  }
  return 500;
}
int cuFuncGetAttribute(int* value, int attribute, char* function) { *value = 256; return 0; }
int cuLaunchKernel(char* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, char* stream, void** arguments, void** extra) {
  if (fake_current != stream - 1000) return 400;
  if (gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || extra || !gx) return 1;
  fake_launch(function, gx, bx, stream, arguments);
  return 0;
}
"""
_LAUNCH = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
#: Arguments of a launch: kernel, blocks, threads, stream, addresses of the arguments.
Launched = Callable[[str, int, int, int, "ctypes._Pointer[ctypes.c_void_p]"], None]


def built(folder: Path) -> Path:
    """Compiles the driver in a folder."""
    compiler = find_compiler()
    assert compiler is not None
    source, made = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(_TEXT)
    flags = ["-x", "c", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*compiler.command, *flags, "-o", str(made), str(source)], check=True)
    return made


class FakeDriver:
    """The driver of this process from now on: every load of libcuda.so.1 returns it.

    Args:
        launched: called for each launch, which ends before it returns.
    """

    def __init__(self, path: Path, launched: Launched) -> None:
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._launched = _LAUNCH(lambda name, *rest: launched(name.decode(), *rest))
        ctypes.c_void_p.in_dll(self.library, "fake_launch").value = ctypes.cast(self._launched, ctypes.c_void_p).value

    def set(self, **numbers: int) -> None:
        """Sets the numbers that it returns: init, version, major, minor, load; errors are CUDA's."""
        for name, number in numbers.items():
            ctypes.c_int.in_dll(self.library, f"fake_{name}").value = number

    def enter(self, context: int) -> None:
        """Makes a context the current one; 0: none."""
        ctypes.c_void_p.in_dll(self.library, "fake_current").value = context

    @property
    def current(self) -> int:
        """The current context; 0: none."""
        return ctypes.c_void_p.in_dll(self.library, "fake_current").value or 0

    @property
    def loaded(self) -> tuple[int, str]:
        """The number of modules loaded, and the kind of the last one: "ptx", or "sm_90"."""
        raw = (ctypes.c_char * 8).in_dll(self.library, "fake_image").raw
        return ctypes.c_int.in_dll(self.library, "fake_loads").value, "ptx" if raw[:3] == b"ptx" else f"sm_{raw[7]}"
