"""Machine code for GPUs, made without one: NVRTC, from its wheel or the system."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache, lru_cache, partial
from pathlib import Path

from opgraph.errors import DeviceError
from opgraph.runtime.parallel import at_once

#: As the CUDA engine compiles them, with what CuPy adds: a library has its bits.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=true", "--device-as-default-execution-space")
#: Machine code of each generation, which later GPUs of it run, too; and PTX, which drivers compile for all later ones.
CUBINS, PTX = ("sm_80", "sm_90", "sm_100"), "compute_80"
_WHERE, _FIX = "ort_library for CUDA", "pip install nvidia-cuda-nvrtc (13 or newer)"


@lru_cache(maxsize=4)  # a model is tried before it gets its name
def compiled(text: str) -> dict[str, bytes]:
    """A CUDA text for every GPU that a library serves: by architecture, PTX with a zero at its end.

    Raises:
        DeviceError: there is no NVRTC, or it refused the text; with its log.
    """
    library()  # before several threads look for it
    names = (*CUBINS, PTX)
    made: dict[str, bytes] = {}

    def compile_for(name: str) -> None:
        made[name] = _compiled(text, name)

    at_once([partial(compile_for, name) for name in names])
    return {name: made[name] for name in names}


@cache
def library() -> ctypes.CDLL:
    """NVRTC.

    Raises:
        DeviceError: it is nowhere.
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
