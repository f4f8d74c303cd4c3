"""Compiles CUDA text and reads its machine code without a GPU: NVRTC and nvdisasm from their wheels."""

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

from opgraph.codegen.kernel import KernelSource
from opgraph.codegen.prune_source import needed

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
#: Options that CuPy 14.2 adds for a RawKernel (cupy/cuda/compiler.py), besides -arch and include folders.
ADDED_BY_CUPY = ("-ftz=true", "--device-as-default-execution-space")
OPTIONS = ("-std=c++17", "-fmad=false", *ADDED_BY_CUPY)
_LINE = re.compile(
    r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P[\dT]+\s+)?(?P<op>[A-Z][\w.]*)(?P<rest>[^;]*);", re.MULTILINE
)
_REGISTERS = re.compile(r"EIATTR_REGCOUNT.*?/\*0008\*/\s+\.word\s+0x([0-9a-f]+)", re.DOTALL)
_REGISTER = re.compile(r"\bR(\d+)\b")


class CompileError(Exception):
    """NVRTC refused the text; the message is its log."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction: its opcode with suffixes, its operands with the target first, and its predicate."""

    op: str
    operands: tuple[str, ...]
    guard: str = ""

    @property
    def is_load(self) -> bool:
        return self.op.startswith("LDG")

    def writes(self) -> set[int]:
        """The registers that a load fills."""
        width = {"64": 2, "128": 4}.get(self.op.rsplit(".", 1)[-1], 1)
        first = int(_REGISTER.findall(self.operands[0])[0])
        return set(range(first, first + width))

    def reads(self) -> set[int]:
        """Registers among the operands after the target; for a store, all of them."""
        given = self.operands if self.op.startswith(("STG", "ST.")) else self.operands[1:]
        return {int(r) for text in given for r in _REGISTER.findall(text)}


@dataclass(frozen=True, slots=True)
class MachineCode:
    """The machine code of one kernel.

    Attributes:
        registers: for each thread.
        instructions: in order; those of out-of-line functions at the end.
    """

    registers: int
    instructions: tuple[Instruction, ...]

    @property
    def whole_tile(self) -> tuple[Instruction, ...]:
        """The path of a block without bounds checks: up to the first branch, and the part with the most stores.

        A part ends where every thread exits. sm_80 and sm_90 put that part first, sm_100 last.
        """
        parts: list[list[Instruction]] = [[]]
        for instruction in self.instructions:
            parts[-1].append(instruction)
            if instruction.op == "EXIT" and not instruction.guard:
                parts.append([])

        def rank(part: list[Instruction]) -> tuple[int, int]:
            stores = [x.op.endswith(".128") for x in part if x.op.startswith("STG")]
            return sum(stores), -len(stores)

        best = max(parts, key=rank)
        if best is parts[0]:
            return tuple(best)
        branch = next(i for i, x in enumerate(parts[0]) if x.op == "BRA")
        return (*parts[0][: branch + 1], *best)

    def count(self, prefix: str) -> int:
        """The number of instructions of the whole program whose opcodes begin with `prefix`."""
        return sum(x.op.startswith(prefix) for x in self.instructions)


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
    """The output of nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(disassembler()), file.name], capture_output=True, text=True, check=True).stdout


def machine_code(text: str, arch: str) -> MachineCode:
    """Compiles a text with one kernel as the engine does, and disassembles it."""
    listing = disassemble(compile_text(text, arch, OPTIONS))
    code = listing[listing.index("\t.section\t.text.") :]
    instructions = tuple(
        Instruction(m["op"], tuple(x.strip() for x in m["rest"].split(",")), (m["guard"] or "").strip())
        for m in _LINE.finditer(code)
    )
    return MachineCode(max(int(r, 16) for r in _REGISTERS.findall(listing)), instructions)


def together(sources: list[KernelSource], skeleton: str = "cuda/pointwise.cuh") -> str:
    """Many kernels in one text: the shared headers are compiled once."""
    bodies = {s.entry: s.own for s in sources}
    own = "".join(f"\nnamespace n{i} {{{body}}}\n" for i, body in enumerate(bodies.values()))
    return needed(skeleton, own) + own
