"""The CPU engine: kernels compiled by the C++ compiler on the machine, cached on disk, loaded with ctypes."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from opgraph.codegen.kernel import KernelSource
from opgraph.errors import DeviceError
from opgraph.runtime import cache as disk
from opgraph.runtime import processor
from opgraph.runtime.compiler_log import ops_of, told
from opgraph.schedule.cpu_body import Form
from opgraph.schedule.schedule import GROUPS

# No contraction: every fused multiply-add is written out, so that the CPU and the GPU do the same arithmetic.
FLAGS = (
    "-std=c++17", "-ftree-vectorize", "-march=native", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-fPIC", "-shared",
)  # fmt: skip
# The level of optimization. All that counts is the vectorised loop. Of what GCC's -O2 adds to -O1, these flags are what
# kernels gain from; the rest takes a quarter of GCC's time and makes them 0.5% faster (measured). -O3 gains nothing.
LEVEL = ("-O2",)
GCC_LEVEL = (
    "-O1", "-fstrict-aliasing", "-fexpensive-optimizations", "-falign-functions", "-falign-loops", "-falign-jumps",
)  # fmt: skip
GCC_FLAGS = ("-fvect-cost-model=unlimited",)
# A flat kernel's last few elements, which no full vector holds, are done one by one: GCC would copy the loop for half
# vectors, which takes up to half of its time. Kernels over rows keep the copy: a row may be short.
FLAT_FLAGS = ("--param", "vect-epilogues-nomask=0")
# A grouped reduction has one loop in many copies, and few values cross from one to another. One allocation of registers
# for the whole function takes 0.8 of the compiler's time for ResNet-18's batch norms, with kernels as fast (measured).
GROUPED_FLAGS = ("-fira-region=one",)
# Kernels of two branches need -O2: with less, GCC does not vectorise them for 8 floats. For 16 their own text does it:
# these passes find nothing there, take an eighth of the compiler's time, and make NAF1 2% slower (measured).
BRANCH_FLAGS = (
    "-fno-tree-dominator-opts", "-fno-tree-vrp", "-fno-code-hoisting", "-fno-dse", "-fno-forward-propagate",
    "-fno-tree-pre", "-fno-gcse", "-fno-schedule-insns2",
)  # fmt: skip
# Functions of a large kernel, 16 floats at a time by their own text: without these passes the assembly is the same, of
# the gradient of 300 mixed ops, in four fifths of the time.
FUNCTION_FLAGS = (
    "-fno-tree-vectorize", "-fno-tree-dominator-opts", "-fno-tree-vrp", "-fno-code-hoisting", "-fno-dse",
    "-fno-tree-ccp", "-fno-tree-bit-ccp", "-fno-tree-copy-prop", "-fno-tree-pta", "-fno-tree-sink",
    "-fno-tree-reassoc", "-fno-tree-slsr", "-fno-thread-jumps", "-fno-tree-dce", "-fno-tree-coalesce-vars",
)  # fmt: skip
# Kernels use no library but what GCC makes of arithmetic: to look through the C++ library and to link what starts a
# program takes 13 ms, a twentieth of all that a kernel takes.
NO_LIBRARY, LIBRARIES = ("-nostdlib",), ("-lm", "-lgcc")
#: Asks for lines of results early, or writes past the caches.
OWNS_LINES = "-DOG_OWNS_LINES=1"
#: Leaves kernels/math/lanes.h out.
NO_LANES = "-DOG_NO_LANES"
_COMPILERS = ("g++", "c++", "clang++")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: how it is called.
        identity: changes when the compiler does; part of the cache key.
        version: what it says of itself.
    """

    command: tuple[str, ...]
    identity: str
    version: str

    @property
    def is_gcc(self) -> bool:
        """Whether it knows the flags of GCC: a name tells nothing, g++ and c++ may be clang."""
        return "Free Software Foundation" in self.version

    def flags(self, *, flat: bool, branches: bool, grouped: bool = False) -> tuple[str, ...]:
        """The flags for a kernel.

        Args:
            flat: whether its innermost loop is the whole space.
            branches: whether it has two (kernels/cpu/branch_compaction.h).
            grouped: whether it is a grouped reduction (kernels/cpu/grouped_reduction.h).
        """
        if not self.is_gcc:
            return (*LEVEL, *FLAGS)
        named = NO_LIBRARY if self.libraries else ()
        own = (OWNS_LINES,) if processor.owns_lines() else ()
        level, kind = (LEVEL, BRANCH_FLAGS) if branches else (GCC_LEVEL, GROUPED_FLAGS if grouped else ())
        return (*level, *FLAGS, *GCC_FLAGS, *(FLAT_FLAGS if flat else ()), *kind, *own, *named)

    @property
    def libraries(self) -> tuple[str, ...]:
        """What kernels are linked to by name, without those that a compiler adds by itself."""
        return LIBRARIES if self.is_gcc and sys.platform.startswith("linux") else ()


#: What each compiler on the PATH said that is not used, because it does not run.
_unusable: list[str] = []


@cache
def find_compiler() -> Compiler | None:
    """The compiler to use: what CXX names, the first on the PATH that runs, else the ziglang wheel, else None."""
    _unusable.clear()
    for words in (os.environ.get("CXX", "").split(), *([name] for name in _COMPILERS)):
        found = [shutil.which(word) for word in words]  # "ccache g++" are two programs
        if found and found[0] is not None:
            command = (found[0], *words[1:])
            identity = " ".join((*map(_file_identity, filter(None, found)), *words[1:]))
            try:
                return Compiler(command, identity, _version(command, identity))
            except OSError as error:
                _unusable.append(f"{' '.join(command)}: {error}")
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.submodule_search_locations:
        zig = os.path.join(spec.submodule_search_locations[0], "zig")
        if os.path.exists(zig):
            # Kernels use no library; with one, the first build would compile that (36 s and more; 0.4 s without).
            return Compiler((zig, "c++", "-nostdlib"), _file_identity(zig), "zig c++")
    return None


def no_compiler() -> str:
    """That there is none, and why each one on the PATH is not used: what messages say."""
    return "; ".join(("there is no C++ compiler", *_unusable))


def _version(command: Sequence[str], identity: str) -> str:
    """What a compiler says of itself, kept on disk: asking starts a process.

    Raises:
        OSError: it does not run, with the reason.
    """
    name = disk.key("what a compiler says of itself", *command, identity) + ".version"
    entry = disk.find(name)
    if entry is not None:
        return disk.content(entry).decode()
    import subprocess

    done = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, errors="replace", check=False,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode:
        raise OSError(" ".join(done.stderr.split()) or f"exit status {done.returncode}")
    with suppress(OSError):  # asked again by the next process
        disk.store(name, done.stdout.encode())
    return done.stdout


def _file_identity(path: str) -> str:
    # Asking the compiler for its version would start a process; its file tells as much in microseconds.
    real = os.path.realpath(path)
    state = os.stat(real)
    return f"{real} {state.st_size} {state.st_mtime_ns}"


@cache
def has_lanes() -> bool:
    """Whether kernels do 16 floats at a time on this machine (kernels/math/lanes.h)."""
    compiler = find_compiler()
    return compiler is not None and compiler.is_gcc and processor.has_avx512()


_loaded: dict[str, Any] = {}
#: Entries of kernels that this process compiled without og::floats, which has no form of an op in them, or which this
#: GCC does not compile: slower, with the same bits.
without_lanes: list[str] = []


def load(source: KernelSource, labels: tuple[str, ...], *, flat: bool = False) -> Any:
    """The entry point of a kernel, as a ctypes function; compiled if the disk cache does not have it.

    Args:
        source: the kernel.
        labels: label of each op, for messages.
        flat: whether its innermost loop is the whole space, not a row.

    Raises:
        DeviceError: no compiler, or it refused the source; with its log and the ops that its lines came from.
    """
    compiler = find_compiler()
    if compiler is None:
        raise DeviceError(
            no_compiler(),
            where="the CPU engine",
            fix="install g++ or clang, or: pip install 'opgraph[compiler]'",
        )
    branches, grouped = source.form is Form.BRANCHES, source.schedule in GROUPS
    flags = compiler.flags(flat=flat, branches=branches, grouped=grouped)
    name = (
        disk.key(
            source.code,
            " ".join((*compiler.command[1:], *flags, *compiler.libraries)),
            compiler.identity,
            processor.identity(),
        )
        + ".so"
    )
    if name in _loaded:
        return _loaded[name]
    path = disk.find(name)
    if path is None:
        try:
            path = disk.store(name, _compiled(source, compiler, flags, labels))
        except OSError as error:
            raise _no_place(
                source, error, "make room there, or set TMPDIR and XDG_CACHE_HOME to other folders"
            ) from error
    try:
        entry = getattr(ctypes.CDLL(str(path)), source.entry)
    except OSError as error:  # a folder from which no program may run
        raise _no_place(source, error, "set XDG_CACHE_HOME to a folder from which programs may run") from error
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    entry.argtypes, entry.restype = [pointer, pointer, i64, i64, i64, pointer], None
    _loaded[name] = entry
    return entry


#: Bytes that the files of one compilation may take.
_ROOM = 1 << 20


def _compiled(source: KernelSource, compiler: Compiler, flags: tuple[str, ...], labels: tuple[str, ...]) -> bytes:
    import tempfile

    from opgraph.runtime.build_library import FILE, built  # most processes find their kernels on disk

    for form in (), (NO_LANES,):
        functions = FUNCTION_FLAGS if has_lanes() and not form else ()
        made = built(source, compiler.command, (*flags, *form), compiler.libraries, functions)
        if made.library is not None:
            if form:
                without_lanes.append(source.entry)
            return made.library
    if shutil.disk_usage(tempfile.gettempdir()).free < _ROOM:  # the compiler could not even write what it had to say
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    refuser = compiler.version.partition("\n")[0] or compiler.command[0]
    raise DeviceError(
        f"{refuser} refused kernel {source.entry}:\n{told(made.log, source, labels, FILE)}",
        where=ops_of(made.log, source, labels, FILE) or compiler.command[0],
        fix="check the compiler; if it is sound, this is a bug of opgraph: report it with the source (f.kernels)",
    )


def _no_place(source: KernelSource, error: OSError, fix: str) -> DeviceError:
    import tempfile

    return DeviceError(
        f"kernel {source.entry} cannot be kept or loaded: {error.strerror or error}",
        where=f"{tempfile.gettempdir()} or {disk.folder()}",
        fix=fix,
    )


def is_available() -> bool:
    """Whether kernels can be compiled on this machine."""
    return find_compiler() is not None and sys.platform.startswith(("linux", "darwin"))
