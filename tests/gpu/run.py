"""Everything that needs a GPU, as one command without network: `python tests/gpu/run.py FOLDER`, from a checkout.

What the machine has, the tests, the benchmark, compute-sanitizer with planted faults, in the order of what is worth
most; logs, results as they come and a summary go to FOLDER: at most 8 files of at most 12 MiB, none in a folder below.
Each step is a process with a limit of its own, so that one that hangs, or loses the GPU, loses only itself, and is
asked to end before it is killed: a test run then still says what has failed. Together they end in time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FOUND = 9  # what compute-sanitizer exits with where it finds an error
GRACE = 12.0  # seconds between asking a step to end and killing it
LARGEST = 12 << 20  # bytes of a file
_ENVIRONMENT = """
import importlib.metadata as metadata, platform, sys
print(sys.version, platform.platform())
for name in "numpy ml_dtypes torch triton cupy-cuda13x cupy-cuda12x onnx onnxruntime networkx scipy pytest".split():
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "-")
import cupy
import shutil, subprocess
print("compiler", shutil.which("g++") or shutil.which("clang++"))
smi = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit,mig.mode.current"
if shutil.which("nvidia-smi"):
    subprocess.run(["nvidia-smi", f"--query-gpu={smi}", "--format=csv"], check=False, timeout=20)
print("runtime", cupy.cuda.runtime.runtimeGetVersion(), "driver", cupy.cuda.runtime.driverGetVersion())
properties = cupy.cuda.runtime.getDeviceProperties(0)
print(properties["name"], properties["multiProcessorCount"], "multiprocessors", properties["totalGlobalMem"], "bytes")
import torch
print("torch sees", torch.cuda.get_device_name(0), torch.version.cuda)
import numpy as np, opgraph as og
g = og.Graph()
x = g.input("x", "f32", (None,))
g.output(g.add_op("Swish", x))
y = og.compile(g, device="cuda")(x=cupy.ones(1000, "f4"))
assert abs(float(y.sum()) - 731.0586) < 1e-2, y
print("a kernel runs")
"""


@dataclass
class Step:
    """One command.

    Attributes:
        limit: seconds after which it and its children are killed.
        log: file that its output is added to.
        expected: exit status.
        spare: its part of the time that is left when all have their limits.
        said: the last line of its log.
        after: a step without whose good end this one would say nothing.
    """

    name: str
    command: list[str]
    limit: float
    log: str
    expected: int = 0
    seconds: float = 0.0
    status: int | str = "not run"
    environment: dict[str, str] = field(default_factory=dict)
    after: str = ""
    spare: float = 0.0
    said: str = ""

    @property
    def is_good(self) -> bool:
        return self.status == self.expected

    def run(self, folder: Path, limit: float) -> None:
        """Runs it for at most `limit` seconds."""
        print(f"== {self.name} (at most {limit:.0f} s)", flush=True)
        started = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": search_path(ROOT), "PYTHONUNBUFFERED": "1", **self.environment}
        with open(folder / self.log, "a", encoding="utf-8") as log:
            print(f"== {self.name}: {' '.join(self.command)}", file=log, flush=True)
            process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
            )
            try:
                self.status = process.wait(max(limit - GRACE, 1))
            except subprocess.TimeoutExpired:
                self.status = "out of time"
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            finally:
                _kill(process)
        shorten(folder / self.log)
        self.said = last_line(folder / self.log)
        self.seconds = round(time.monotonic() - started, 1)
        print(f"   {'as it should be' if self.is_good else f'NOT GOOD: {self.status}'}, {self.seconds} s", flush=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its children, which may outlive it: they hold the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def search_path(*folders: Path) -> str:
    """Where Python looks first."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def shorten(log: Path) -> None:
    """Leaves both ends of a log that is too long to come back."""
    size = log.stat().st_size
    if size <= LARGEST:
        return
    with open(log, "rb") as file:
        head = file.read(LARGEST // 2)
        file.seek(size - LARGEST // 3)
        tail = file.read()
    log.write_bytes(head + f"\n... {size - len(head) - len(tail)} bytes are left out ...\n".encode() + tail)


def last_line(log: Path) -> str:
    """What a log ends with: of a test run, how many passed."""
    with open(log, "rb") as file:
        file.seek(max(log.stat().st_size - 2000, 0))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def steps(folder: Path) -> list[Step]:
    """In order of what is worth most; compute-sanitizer, which not every machine lets look, gets what is left."""
    python = sys.executable
    program = str(HERE / "sanitized.py")
    cores = min(12, os.cpu_count() or 1)
    # Other versions of other people's libraries warn, on import too; here that is no failure.
    options = ["-q", "-p", "as_they_come", "--gpu", "--tb=no", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    options += ["-W", "default", "--durations=15"]
    if importlib.util.find_spec("xdist"):
        # Each worker begins somewhere else: a run that is cut off has seen something of every file.
        options += ["-n", str(cores), "--dist", "worksteal", "--max-worker-restart", "60"]
    if importlib.util.find_spec("pytest_timeout"):  # one that hangs on the GPU loses one worker, not all that follows
        options += ["--timeout", "100", "--timeout-method", "thread"]
    bench = [python, "-m", "opgraph", "bench", "--device", "cuda", "--budget", "BUDGET"]
    # Two processes: a peer that takes the GPU with it, or hangs, leaves the other half.
    parts = {"activation": ("activation", "host"), "others": ("chain", "layout", "rows", "compile")}
    found = [
        Step("environment", [python, "-c", _ENVIRONMENT], 40, "environment.log"),
        # Compiled by all cores into CuPy's cache, for what follows to find.
        Step("every kind of kernel", [python, program, "--threads", str(cores)], 50, "sanitizer.log"),
        Step("tests", [python, "-m", "pytest", str(HERE), *options], 200, "tests.log", spare=1),
    ]
    # The CPU engine's threads, of every worker, would wait for each other.
    found[2].environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": search_path(ROOT, HERE)}
    for (name, suites), limit in zip(parts.items(), (150, 120)):
        chosen = [word for suite in suites for word in ("--suite", suite)]
        command = [*bench, *chosen, "--json", str(folder / f"bench-{name}.json")]
        found.append(Step(f"benchmark of {name}", command, limit, "bench.log", spare=2))
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    for tool in ("memcheck", "racecheck", "initcheck"):
        # Libraries ask the driver for what it does not have; a call that fails is not what a kernel did.
        own = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = [sanitizer, "--tool", tool, *own, "--error-exitcode", str(FOUND), python, program]
        fault = Step(f"{tool} finds a planted fault", [*command, "--fault", tool], 40, "sanitizer.log", FOUND)
        found += [fault, Step(f"{tool} of every kind of kernel", command, 60, "sanitizer.log", after=fault.name)]
    return found


def _run_in_time(step: Step, folder: Path, chosen: list[Step], ends: float) -> None:
    left = ends - time.monotonic()
    limit = min(step.limit, left)
    step.command = [str(int(max(limit - GRACE - 10, 5))) if part == "BUDGET" else part for part in step.command]
    if left <= GRACE:
        return
    if not shutil.which(step.command[0]):
        step.status = f"there is no {step.command[0]}"
    elif any(s.name == step.after and not s.is_good for s in chosen):
        step.status = f"not run, as this was not good: {step.after}"
    else:
        step.run(folder, limit)


def share(chosen: list[Step], seconds: float) -> None:
    """Longer limits for some, where few steps were asked for."""
    spare, parts = seconds - sum(s.limit for s in chosen), sum(s.spare for s in chosen)
    for step in chosen:
        step.limit += max(spare, 0) * step.spare / parts if parts else 0


def _told(step: Step) -> dict[str, object]:
    told = {"step": step.name, "status": step.status, "good": step.is_good, "seconds": step.seconds}
    return told | ({"said": step.said} if step.said else {})


def main(arguments: list[str] | None = None) -> int:
    """Runs the steps that are asked for; 0 where each ended as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for logs and results; made where it is not there")
    parser.add_argument("--seconds", type=float, default=580, help="for all together (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="steps with this in their name; repeat")
    given = parser.parse_args(arguments)
    folder: Path = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + given.seconds
    chosen = [s for s in steps(folder) if not given.only or any(text in s.name for text in given.only)]
    share(chosen, given.seconds)
    with tempfile.TemporaryDirectory(prefix="opgraph-gpu-", ignore_cleanup_errors=True) as cache:
        for step in chosen:
            step.environment["CUPY_CACHE_DIR"] = cache  # whatever is in the home folder, or if there is none
            _run_in_time(step, folder, chosen, ends)
            rows = [_told(s) for s in chosen]
            (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for step in chosen:
        print(f"{'good' if step.is_good else 'BAD '}  {step.name}: {step.status}, {step.seconds} s")
    return 0 if all(s.is_good for s in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
