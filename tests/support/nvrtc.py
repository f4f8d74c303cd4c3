"""Compiling CUDA text and reading its machine code without a GPU: NVRTC and nvdisasm from their wheels."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_LINE = re.compile(
    r"^\s*/\*(?P<at>[0-9a-f]+)\*/\s+(?:@!?U?P[\dT]+\s+)?(?P<op>[A-Z][\w.]*)(?P<rest>[^;]*);", re.MULTILINE
)
_HEADER = re.compile(r"^\s*\.section\s+\.text\.(?P<name>\w+),", re.MULTILINE)


class CompileError(Exception):
    """NVRTC refused the text; the message is its log."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction: address, opcode with its suffixes, operands, and whether it is predicated."""

    at: int
    op: str
    rest: str

    def __str__(self) -> str:
        return f"{self.op} {self.rest.strip()}"


def _inside_nvidia(pattern: str) -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(folder).glob(pattern))
        if found:
            return found[-1]
    return None


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC of the wheel nvidia-cuda-nvrtc, or None."""
    path = _inside_nvidia("*/lib/libnvrtc.so.*[0-9]")
    return ctypes.CDLL(str(path)) if path else None


@cache
def disassembler() -> Path | None:
    """nvdisasm of the wheel nvidia-cuda-nvdisasm, or None."""
    return _inside_nvidia("*/bin/nvdisasm")


def compile_text(text: str, arch: str, options: Sequence[str]) -> bytes:
    """The cubin of a CUDA text.

    Raises:
        CompileError: NVRTC refused it.
    """
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    try:
        given = [f"-arch={arch}".encode(), *[o.encode() for o in options]]
        status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        if status:
            raise CompileError(_bytes(nvrtc, "ProgramLog", program).rstrip(b"\0").decode())
        return _bytes(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    data = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, data) == 0
    return data.raw


def disassemble(cubin: bytes) -> str:
    """What nvdisasm prints."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(disassembler()), file.name], capture_output=True, text=True, check=True).stdout
