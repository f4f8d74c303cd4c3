"""Compiles machine code for GPUs on a machine without a GPU, with NVRTC from its wheel or the system."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache, lru_cache, partial
from pathlib import Path

from opgraph.errors import DeviceError
from opgraph.runtime.parallel import at_once

#: The options of the CUDA engine and those that CuPy adds: a library's results are bitwise the same.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=true", "--device-as-default-execution-space")
#: Machine code for each GPU generation, valid for its later GPUs too; PTX, which drivers compile for all newer ones.
CUBINS, PTX = ("sm_80", "sm_90", "sm_100"), "compute_80"
_WHERE, _FIX = "ort_library for CUDA", "pip install nvidia-cuda-nvrtc (13 or newer)"


@lru_cache(maxsize=4)  # a model may be compiled again when it gets its final name
def compiled(text: str) -> dict[str, bytes]:
    """Compiles a CUDA text for every GPU that a library supports: code by architecture, PTX with a zero at its end.

    Raises:
        DeviceError: there is no NVRTC, or it refused the text (the log is included).
    """
    library()  # load it once, before several threads need it
    names = (*CUBINS, PTX)
    made: dict[str, bytes] = {}

    def compile_for(name: str) -> None:
        made[name] = _compiled(text, name)

    at_once([partial(compile_for, name) for name in names])
    return {name: made[name] for name in names}


@cache
def library() -> ctypes.CDLL:
    """Loads NVRTC.

    Raises:
        DeviceError: it was not found.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [str(path) for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc.so.*[0-9]"), reverse=True)]
    for path in (*found, "libnvrtc.so"):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise DeviceError("NVRTC, which compiles kernels for GPUs, is not installed", where=_WHERE, fix=_FIX)


def _compiled(text: str, architecture: str) -> bytes:
    nvrtc = library()
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None):
        raise DeviceError("NVRTC made no program of the kernels", where=_WHERE, fix=_FIX)
    try:
        options = [f"-arch={architecture}".encode(), *[option.encode() for option in OPTIONS]]
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = _read(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            lines = "\n".join(f"    {line}" for line in log.strip().splitlines()[:20])
            raise DeviceError(f"NVRTC refused the kernels for {architecture}:\n{lines}", where=_WHERE, fix=_FIX)
        made = _read(nvrtc, "PTX" if architecture == PTX else "CUBIN", program)
        if not made:
            raise DeviceError(f"NVRTC made nothing of the kernels for {architecture}", where=_WHERE, fix=_FIX)
        return made
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    if getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
        return b""
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data.raw
