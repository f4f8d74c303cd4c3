"""The machine, the versions and the commit that a result belongs to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import opgraph as og
from opgraph.errors import InvalidArguments

#: Packages whose versions are reported.
PACKAGES = (
    "numpy",
    "torch",
    "onnxruntime",
    "onnx",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "triton",
    "numexpr",
    "liger-kernel",
)


def machine() -> dict[str, object]:
    """CPU, threads, GPU if one is in use, versions, commit and date."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads(),
        **_gpu(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := installed(name))},
        "opgraph": og.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def installed(package: str) -> str:
    """The version of an installed distribution; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """The name of the CPU, as the machine reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def threads() -> int:
    """The number of threads of torch, if it is loaded, and so of opgraph."""
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else len(os.sched_getaffinity(0))


def _gpu() -> dict[str, object]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "sm": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": round(properties.L2_cache_size / 2**20),
    }
    return found | _driver(torch.cuda.current_device())


def _driver(device: int) -> dict[str, object]:
    """The driver, and the maximum clocks of the multiprocessors and the memory, from `nvidia-smi` if it exists."""
    asked = {"driver": "driver_version", "gpu_mhz": "clocks.max.sm", "gpu_memory_mhz": "clocks.max.memory"}
    command = [
        "nvidia-smi",
        f"--id={device}",
        f"--query-gpu={','.join(asked.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [word.strip() for word in done.stdout.split(",")]
    return {name: int(v) if v.isdigit() else v for name, v in zip(asked, values)}


def commit() -> str:
    """The commit of the checkout that opgraph was loaded from, with "+" if files changed since; empty if installed."""
    package = Path(og.__file__).parent
    if not _git(package, "ls-files", "__init__.py"):  # a repository that only contains the environment
        return ""
    return _git(package, "describe", "--always", "--dirty=+")


def _git(folder: Path, *args: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def use_threads(count: int | None) -> int:
    """Sets the number of threads of torch, if it is loaded, and so of opgraph; returns the number that both have.

    Raises:
        InvalidArguments: more threads than cores, or fewer than one.
    """
    cores = len(os.sched_getaffinity(0))
    if count is not None and not 1 <= count <= cores:
        raise InvalidArguments(f"{count} threads on {cores} cores", where="--threads", fix=f"use 1 to {cores}")
    torch = sys.modules.get("torch")
    if torch is None:
        return cores if count is None else count
    if count is not None:
        torch.set_num_threads(count)
    return int(torch.get_num_threads())


def fresh_process(code: str, cache: str, more: Mapping[str, str] | None = None) -> list[float]:
    """The seconds that a new process prints, as milliseconds.

    Args:
        code: Python that prints numbers.
        cache: the folder for caches, including opgraph's.
        more: additional environment variables.

    Raises:
        RuntimeError: the process failed; the message is the end of its error output.
    """
    env = {**os.environ, "XDG_CACHE_HOME": cache, **(more or {})}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])
    return [float(word) * 1e3 for word in done.stdout.split()]
