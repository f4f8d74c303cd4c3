"""Threads of the CPU engine: the OpenMP runtime that the process already has.

With torch loaded, its idle OpenMP workers spin. A second runtime or a separate pool next to it runs at half its speed
or worse, so kernels use the `GOMP_parallel` that torch has loaded. After a fork, OpenMP hangs in the child, so
everything runs single-threaded there. A machine without any OpenMP runtime uses a pool of Python threads: a kernel
releases the interpreter lock while it runs.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

#: Below this number of elements, one thread does all work: waking a second one costs more than it saves.
SINGLE_THREADED = 64 * 1024


@dataclass(frozen=True, slots=True)
class Team:
    """The parallel runtime of kernels.

    Attributes:
        parallel: address of GOMP_parallel, or None.
        max_threads: omp_get_max_threads, which respects OMP_NUM_THREADS and torch.set_num_threads; no limit for a pool.
    """

    parallel: int | None
    max_threads: Callable[[], int]


_POOL = Team(None, lambda: sys.maxsize)
_teams: dict[bool, Team] = {}
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def team(size: int) -> tuple[int, int | None]:
    """(threads, address of GOMP_parallel) for a call of `size` elements; without an address, use `run_in_pool`."""
    if size < SINGLE_THREADED or _forked:
        return 1, None
    with_torch = "torch" in sys.modules
    found = _teams.get(with_torch) or _team(with_torch)
    return min(found.max_threads(), len(os.sched_getaffinity(0))), found.parallel


def _team(with_torch: bool) -> Team:
    found = _teams[with_torch] = _teams.get(with_torch) or _find(with_torch)
    return found


def limit() -> int | None:
    """The number of threads that a library may use next to the kernels; None: the number of the machine's cores.

    The limit is that of kernels: the cores that this process may run on, and the settings of torch or OpenMP.
    onnxruntime counts the machine's cores instead, and two of its threads then spin on one.
    """
    count = min(_team("torch" in sys.modules).max_threads(), len(os.sched_getaffinity(0)))
    return None if count >= (os.cpu_count() or 1) else count


@cache
def _pool() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # costs milliseconds of `import opgraph`

    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="opgraph")


def run_in_pool(work: Callable[[int, int], object], size: int, count: int) -> None:
    """Calls `work(begin, end)` for `count` pieces of `size` elements in parallel, and waits."""
    step = -(-size // count)
    waiting = [_pool().submit(work, begin, min(begin + step, size)) for begin in range(0, size, step)]
    for piece in waiting:
        piece.result()


def _find(with_torch: bool) -> Team:
    for path in _candidates(with_torch):
        try:
            library = _loaded(path)
            address = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
            maximum = library.omp_get_max_threads
        except (OSError, AttributeError):
            continue
        maximum.argtypes, maximum.restype = [], ctypes.c_int
        return Team(address, maximum)
    return _POOL


def _loaded(path: str) -> ctypes.CDLL:
    """Loads an OpenMP runtime; its idle threads sleep, unless it was loaded before, or the user chose otherwise.

    Spinning threads would occupy cores that onnxruntime's threads, or another program's, could use. Measured on 2
    cores: an EfficientNet of 39 kernels and 33 onnxruntime regions takes 64 ms spinning, 3.3 ms sleeping; one kernel of
    1M floats after a pause on a busy machine takes 20 ms spinning, 0.5 ms sleeping. Waking a thread costs about 20 us.
    """
    policy = "OMP_WAIT_POLICY"
    before = os.environ.get(policy)
    os.environ[policy] = before or "passive"  # the library reads it only while it is loaded
    try:
        return ctypes.CDLL(path)
    finally:
        if before is None:
            del os.environ[policy]


def _candidates(with_torch: bool) -> list[str]:
    try:
        with open("/proc/self/maps") as maps:
            loaded = sorted({m.group() for line in maps if (m := re.search(r"/\S*libgomp[^/\s]*$", line.strip()))})
    except OSError:
        loaded = []
    if with_torch:
        loaded.sort(key=lambda p: "torch" not in p)
    return [*loaded, "libgomp.so.1"]
