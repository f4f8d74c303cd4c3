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
from threading import Lock
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
# The optimization level. Only the vectorised loop matters. Of the flags that GCC's -O2 adds to -O1, kernels gain from
# these; the rest takes a quarter of GCC's time and makes kernels 0.5% faster (measured). -O3 gains nothing.
LEVEL = ("-O2",)
GCC_LEVEL = (
    "-O1", "-fstrict-aliasing", "-fexpensive-optimizations", "-falign-functions", "-falign-loops", "-falign-jumps",
)  # fmt: skip
GCC_FLAGS = ("-fvect-cost-model=unlimited",)
# A flat kernel processes its last few elements, fewer than a full vector, one by one. GCC would copy the loop for half
# vectors, which takes up to half of its time. Kernels over rows keep the copy: a row may be short.
FLAT_FLAGS = ("--param", "vect-epilogues-nomask=0")
# A grouped reduction has many copies of one loop, and few values are live across copies. With register allocation for
# the whole function at once, ResNet-18's batch norms compile in 0.8 times the time and are as fast (measured).
GROUPED_FLAGS = ("-fira-region=one",)
# Kernels with two branches need -O2: with less, GCC does not vectorise them for 8 floats. For 16 floats their source is
# vectorised: these passes find nothing there, take an eighth of the compile time, and make NAF1 2% slower (measured).
BRANCH_FLAGS = (
    "-fno-tree-dominator-opts", "-fno-tree-vrp", "-fno-code-hoisting", "-fno-dse", "-fno-forward-propagate",
    "-fno-tree-pre", "-fno-gcse", "-fno-schedule-insns2",
)  # fmt: skip
# For functions of a large kernel, whose source processes 16 floats at a time. Without these passes, the gradient of 300
# mixed ops compiles to the same assembly in four fifths of the time.
FUNCTION_FLAGS = (
    "-fno-tree-vectorize", "-fno-tree-dominator-opts", "-fno-tree-vrp", "-fno-code-hoisting", "-fno-dse",
    "-fno-tree-ccp", "-fno-tree-bit-ccp", "-fno-tree-copy-prop", "-fno-tree-pta", "-fno-tree-sink",
    "-fno-tree-reassoc", "-fno-tree-slsr", "-fno-thread-jumps", "-fno-tree-dce", "-fno-tree-coalesce-vars",
)  # fmt: skip
# Kernels use no library except for calls that GCC generates for arithmetic. Searching the C++ library and linking
# program startup code takes 13 ms, a twentieth of the time to build a kernel.
NO_LIBRARY, LIBRARIES = ("-nostdlib",), ("-lm", "-lgcc")
#: Prefetches the cache lines of results, or writes results with non-temporal stores.
OWNS_LINES = "-DOG_OWNS_LINES=1"
#: Excludes kernels/math/lanes.h.
NO_LANES = "-DOG_NO_LANES"
_COMPILERS = ("g++", "c++", "clang++")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: the program and its first arguments.
        identity: changes when the compiler does; part of the cache key.
        version: its version text.
    """

    command: tuple[str, ...]
    identity: str
    version: str

    @property
    def is_gcc(self) -> bool:
        """True if it accepts the flags of GCC. The name does not show this: g++ and c++ may be clang."""
        return "Free Software Foundation" in self.version

    def flags(self, *, flat: bool, branches: bool, grouped: bool = False) -> tuple[str, ...]:
        """The flags for a kernel.

        Args:
            flat: whether its innermost loop is the whole space.
            branches: whether it has two branches (kernels/cpu/branch_compaction.h).
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
        """The libraries that kernels are linked with by name; a compiler's implicit ones are not listed."""
        return LIBRARIES if self.is_gcc and sys.platform.startswith("linux") else ()


#: The error of each compiler on the PATH that does not run and is therefore not used.
_unusable: list[str] = []


@cache
def find_compiler() -> Compiler | None:
    """The compiler to use: the one in CXX, else the first on the PATH that runs, else the ziglang wheel, else None."""
    _unusable.clear()
    for words in (os.environ.get("CXX", "").split(), *([name] for name in _COMPILERS)):
        found = [path and os.path.abspath(path) for path in map(shutil.which, words)]  # "ccache g++" are two programs
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
            # Kernels use no library. With one, the first build would compile it (36 s and more; 0.4 s without).
            return Compiler((zig, "c++", "-nostdlib"), _file_identity(zig), "zig c++")
    return None


def no_compiler() -> str:
    """The message that there is no compiler, with the reason for each one on the PATH."""
    return "; ".join(("there is no C++ compiler", *_unusable))


def _version(command: Sequence[str], identity: str) -> str:
    """Returns the version text of a compiler, cached on disk: each query starts a process.

    Raises:
        OSError: the compiler does not run, with the reason.
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
    with suppress(OSError):  # the next process queries it again
        disk.store(name, done.stdout.encode())
    return done.stdout


def _file_identity(path: str) -> str:
    # Querying the version would start a process; the file identifies the compiler just as well in microseconds.
    real = os.path.realpath(path)
    state = os.stat(real)
    return f"{real} {state.st_size} {state.st_mtime_ns}"


@cache
def has_lanes() -> bool:
    """True if kernels process 16 floats at a time on this machine (kernels/math/lanes.h)."""
    compiler = find_compiler()
    return compiler is not None and compiler.is_gcc and processor.has_avx512()


_loaded: dict[str, Any] = {}
#: By name of the library: held while a thread compiles it.
_compiling: dict[str, Lock] = {}
os.register_at_fork(after_in_child=_compiling.clear)  # the thread that holds one does not exist in the child
#: Entry points of kernels that this process compiled without og::floats, because it lacks one of their ops, or this GCC
#: does not compile it. They are slower, with bit-identical results.
without_lanes: list[str] = []


def load(source: KernelSource, labels: tuple[str, ...], *, flat: bool = False) -> Any:
    """Returns the entry point of a kernel as a ctypes function; compiles the kernel if the disk cache lacks it.

    Args:
        source: the kernel.
        labels: label of each op, for messages.
        flat: whether its innermost loop is the whole space, not a row.

    Raises:
        DeviceError: there is no compiler, or it refused the source; with its log and the ops of the lines in it.
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
    with _compiling.setdefault(name, Lock()):  # another thread may be compiling the same text
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
    except OSError as error:  # a folder that forbids execution
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
    if shutil.disk_usage(tempfile.gettempdir()).free < _ROOM:  # the compiler could not even write its log
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
    """True if kernels can be compiled on this machine."""
    return find_compiler() is not None and sys.platform.startswith(("linux", "darwin"))
