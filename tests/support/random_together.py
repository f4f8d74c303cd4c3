"""Kernels of many random graphs, compiled by one run of the compiler.

A check needs its kernels one after the other, and one compiler run for each takes most of a seed's time. Here many
seeds are in progress, each in a thread, and one thread runs at a time. A seed that needs a kernel waits, and another
one continues. When all wait, one text with the kernels of all is compiled. Seeds do not depend on each other: each has
its own random numbers, and settings of the whole process are restored when a seed continues.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import opgraph as og
from opgraph.codegen import kernel
from opgraph.codegen.kernel import KernelSource
from opgraph.codegen.prune_source import needed
from opgraph.codegen.sources import spliced
from opgraph.runtime import cpu_compiler, executable_builder
from opgraph.runtime.parallel import at_once

#: The attribute that makes GCC inline a function at every level.
_BY_FORCE = "__attribute__((always_inline))"
#: Turns off what `zig c++` adds at -O0 and kernels do not have; any clang has these flags.
_AS_CLANG = ("-w", "-g0", "-fno-sanitize=undefined", "-fno-stack-protector")


class Together:
    """Runs tasks in turns, and compiles the kernels that they wait for in one run, with the flags of all kernels.

    Args:
        most: the number of tasks in progress at a time.
        clang: the command of a clang that compiles the text of GCC's kernels; empty: GCC compiles it.

    Attributes:
        kernels, runs: the number of kernels compiled, and of compiler runs.
    """

    def __init__(self, most: int, clang: Sequence[str] = ()) -> None:
        self._most, self._clang = most, clang
        self._own = threading.local()
        self._loaded: dict[str, Any] = {}
        self._usual = cpu_compiler.load
        self.kernels = self.runs = 0

    def run(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Runs all tasks; one begins when another one ends.

        Raises:
            BaseException: the exception of a task, once all others wait.
        """
        coming = iter(tasks)
        going: list[_Task] = []
        with self._in_place():
            while True:
                while len(going) < self._most and (call := next(coming, None)) is not None:
                    going += [task for task in [_Task(self._entered(call))] if task.goes_on()]
                if not going:
                    return
                self._compile({task.wanted.entry: task.wanted for task in going if task.wanted is not None})
                going = [task for task in going if task.goes_on()]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this context, the current task waits for no other: it holds a lock, or measures."""
        task, self._own.task = getattr(self._own, "task", None), None
        try:
            yield
        finally:
            self._own.task = task

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        cpu_compiler.load, executable_builder.at_once = self._load, self._at_once
        kernel.needed = lambda skeleton, own: ""  # skeletons are not pruned for single kernels
        try:
            yield
        finally:
            cpu_compiler.load, executable_builder.at_once, kernel.needed = self._usual, at_once, needed

    def _entered(self, call: Callable[[], None]) -> Callable[[_Task], None]:
        def run(task: _Task) -> None:
            self._own.task = task
            call()

        return run

    def _load(self, source: KernelSource, labels: tuple[str, ...], *, flat: bool = False) -> Any:
        """Like `cpu_compiler.load`."""
        task = getattr(self._own, "task", None)
        if source.entry not in self._loaded and task is not None and source.own:
            task.wait_for(source)
        found = self._loaded.get(source.entry)
        if found is None and source.own:
            source = replace(source, code=f"{needed(source.skeleton, source.own)}\n\n{source.own}")
        return found or self._usual(source, labels, flat=flat)

    def _at_once(self, calls: Sequence[Callable[[], object]]) -> None:
        """Like `at_once`, but in this thread, which is the task's."""
        if getattr(self._own, "task", None) is None:
            at_once(calls)
        else:
            for call in calls:
                call()

    def _compile(self, wanted: dict[str, KernelSource]) -> None:
        """Compiles and loads kernels. If the compiler refuses the text, each kernel is compiled alone later."""
        compiler = cpu_compiler.find_compiler()
        assert compiler is not None
        self.kernels, self.runs = self.kernels + len(wanted), self.runs + 1
        flags = compiler.flags(flat=False, branches=False)
        with tempfile.TemporaryDirectory(prefix="opgraph-") as folder:
            text, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
            text.write_text(together(wanted.values()))
            compiled = text
            if self._clang:
                compiled = text.with_suffix(".o")
                own = [flag for flag in flags if flag not in (*cpu_compiler.GCC_FLAGS, "-shared")]
                clang = [*self._clang, *own, *_AS_CLANG, "-c", "-o", str(compiled), str(text)]
                if subprocess.run(clang, capture_output=True, check=False).returncode:
                    return
            command = [*compiler.command, *flags, "-o", str(library), str(compiled), *compiler.libraries]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return
            found = ctypes.CDLL(str(library))
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64
        for name in wanted:
            entry = getattr(found, name)
            entry.argtypes, entry.restype = [pointer, pointer, i64, i64, i64, pointer], None
            self._loaded[name] = entry


def together(sources: Iterable[KernelSource]) -> str:
    """One text with several kernels: the includes of their skeletons once, then each in a namespace of its own.

    Functions are not inlined by force: at -O0 the text then takes two to three times as long to compile, for the same
    arithmetic.
    """
    kernels = list(sources)
    head = spliced(*sorted({source.skeleton for source in kernels})).replace(_BY_FORCE, "")
    own = [f"namespace k{i} {{\n{source.own}}}" for i, source in enumerate(kernels)]
    return "\n".join((head, *own, ""))


class _Task:
    """A thread that runs only while `goes_on` waits for it.

    Attributes:
        wanted: the kernel that it waits for.
    """

    def __init__(self, call: Callable[[_Task], None]) -> None:
        self.wanted: KernelSource | None = None
        self._call = call
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self._raised: BaseException | None = None
        self._settings = _settings()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def goes_on(self) -> bool:
        """Runs the task until it waits for a kernel; False if it has ended."""
        before = _settings()
        _set(self._settings)
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        self._settings = _settings()
        _set(before)
        if self._raised is not None:
            raise self._raised
        return not self._ended

    def wait_for(self, source: KernelSource) -> None:
        """Lets others run until the kernel is compiled; called in the task's thread."""
        self.wanted = source
        self._back.release()
        self._go.acquire()
        self.wanted = None

    def _run(self) -> None:
        try:
            self._call(self)
        except BaseException as error:
            self._raised = error
        self._ended = True
        self._back.release()


def _settings() -> tuple[int, int]:
    """The settings of the whole process that checks change and restore."""
    return torch.get_num_threads(), og.onednn.get_compiled_partition_cache_capacity()


def _set(settings: tuple[int, int]) -> None:
    threads, capacity = settings
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if og.onednn.get_compiled_partition_cache_capacity() != capacity:
        og.onednn.set_compiled_partition_cache_capacity(capacity)
