"""Runs everything that needs a GPU, without network: `python tests/gpu/run.py FOLDER --call 1`, then 2 and 3.

A GPU that is available for half an hour is used in three calls, each of which leaves results. The first (290 s) runs
the steps that are most likely to fail: properties of the machine, smoke tests, host costs, one swish against a copy, a
program of every kind of kernel, the tests. The second (540 s) repeats the tests that did not pass, and runs the
benchmarks. The third (580 s) runs compute-sanitizer with planted faults, and profiles slow kernels. Without `--call`
all run in one.

Logs, results as they come and a summary go to FOLDER: a call writes at most 8 files of at most 12 MiB, and no
subfolders. Data for a later call (outcomes of tests, results of benchmarks, compiled kernels) also stay in build/gpu of
the checkout. Each step is a process with its own limit, so that a step that hangs, or loses the GPU, loses only itself.
It is interrupted before it is killed, so that a test run can still print its failures. Together they end in time.
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
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FOUND = 9  # compute-sanitizer's exit status if it finds an error
GRACE = 12.0  # seconds between interrupting a step and killing it
LARGEST = 12 << 20  # bytes of a file
CALLS = {1: 290.0, 2: 540.0, 3: 580.0}  # seconds
KEPT = ROOT / "build" / "gpu"
#: Rows of the benchmark suite "networks".
NETWORKS = (
    "ResNet-18, ReLU, memory",
    "ResNet-18, SiLU, memory",
    "ResNet-18, NAF1, memory",
    "ResNet-18, SiLU, training step",
)
OUTCOMES = "outcomes.txt"
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
assert abs(float(cupy.asnumpy(y).sum()) - 731.0586) < 1e-2, y
print("a kernel runs")
"""


@dataclass
class Step:
    """One command.

    Attributes:
        limit: seconds after which it and its children are killed.
        call: the number of its call.
        log: file that its output is added to.
        expected: exit status.
        spare: its share of the time that remains when all steps have their limits.
        said: the last line of its log.
        after: a step that must succeed for this one to be meaningful.
        keeps: a file that it writes to the folder, for a later call.
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
    call: int = 1
    keeps: str = ""

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
                self.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True,
                preexec_fn=_take_interrupts,
            )  # fmt: skip
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


def _take_interrupts() -> None:
    """Enables interrupts: a shell's background job ignores them, and so would its children, which are ended by one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills it with its children, which may outlive it and hold the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def search_path(*folders: Path) -> str:
    """A PYTHONPATH that starts with the given folders."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def shorten(log: Path) -> None:
    """Keeps only both ends of a log that exceeds the size limit."""
    size = log.stat().st_size
    if size <= LARGEST:
        return
    with open(log, "rb") as file:
        head = file.read(LARGEST // 2)
        file.seek(size - LARGEST // 3)
        tail = file.read()
    log.write_bytes(head + f"\n... {size - len(head) - len(tail)} bytes are left out ...\n".encode() + tail)


def last_line(log: Path) -> str:
    """The last line of a log; for a test run, the number of passed tests."""
    with open(log, "rb") as file:
        file.seek(max(log.stat().st_size - 2000, 0))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def tool(name: str) -> str:
    """A program of the CUDA toolkit: on the path, next to nvcc, or in the toolkit's folders."""
    compiler = shutil.which("nvcc")
    homes = [Path(compiler).resolve().parents[1]] if compiler else []
    homes += [Path(os.environ[v]) for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)] + [Path("/usr/local/cuda")]
    places = [str(home / place) for home in homes for place in ("bin", name, "extras")]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(places)) or name


def _tests(step: Step, folder: Path, *options: str, workers: int) -> Step:
    """A run of pytest that reports the outcome of each test as it ends."""
    # Other versions of other libraries warn, also on import; here that is no failure.
    words = ["-q", "-p", "as_they_come", "--gpu", "--tb=no", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    words += ["-W", "default", "--durations=15", "-k", "not [cpu", "--outcomes", str(folder / OUTCOMES)]
    if importlib.util.find_spec("xdist"):
        # Each worker starts at another place: an interrupted run has covered part of every file.
        words += ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart", "60"]
    if importlib.util.find_spec("pytest_timeout"):  # a test that hangs on the GPU then loses one worker only
        words += ["--timeout", "100", "--timeout-method", "thread"]
    step.command = [sys.executable, "-m", "pytest", *options, *words]
    # Otherwise the threads of all workers' CPU engines would wait for each other.
    step.environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": search_path(ROOT, HERE)}
    step.keeps = OUTCOMES
    return step


def _bench(step: Step, folder: Path, *options: str, json: str = "") -> Step:
    """A run of the benchmark within its limit."""
    step.command = [sys.executable, "-m", "opgraph", "bench", "--device", "cuda", "--budget", "BUDGET", *options]
    step.command += ["--json", str(folder / json)] if json else []
    step.keeps = json
    return step


def first_call(folder: Path) -> list[Step]:
    """The steps that are most likely to fail, the quickest first."""
    program, smoke, cores = str(HERE / "sanitized.py"), str(HERE / "test_smoke.py"), min(12, os.cpu_count() or 1)
    swish = ("--suite", "activation", "--entries", "swish", "--sizes", "64M", "--dtypes", "bf16,f32")
    swish = (
        *swish,
        "--without",
        "torch.compile",
        "--without",
        "Triton",
    )  # their compilation takes longer than all other work
    return [
        Step("environment", [sys.executable, "-c", _ENVIRONMENT], 90, "environment.log"),
        _tests(Step("smoke tests", [], 60, "tests.log"), folder, smoke, workers=min(4, cores)),
        _bench(Step("host costs", [], 25, "bench.log"), folder, "--suite", "host", json="bench-host.json"),
        _bench(Step("a swish and a copy", [], 30, "bench.log"), folder, *swish),
        # Compiled on all cores into CuPy's cache, where later steps find the kernels.
        Step("every kind of kernel", [sys.executable, program, "--threads", str(cores)], 40, "sanitizer.log"),
        _tests(Step("tests", [], 45, "tests.log", spare=1), folder, str(HERE), "--ignore", smoke, workers=cores),
    ]


def second_call(folder: Path) -> list[Step]:
    """Tests that did not pass, and the benchmarks: two processes, so that a hanging peer loses only one."""
    again, cores = (str(HERE), "--again", str(KEPT / OUTCOMES)), min(12, os.cpu_count() or 1)
    activation, others = ("activation",), ("chain", "layout", "rows", "compile")
    found = [_tests(Step("what did not pass", [], 100, "tests.log", call=2), folder, *again, workers=cores)]
    for name, limit, suites in (("activation", 160, activation), ("others", 130, others)):
        step = Step(f"benchmark of {name}", [], limit, "bench.log", call=2, spare=1)
        chosen = [word for suite in suites for word in ("--suite", suite)]
        found.append(_bench(step, folder, *chosen, json=f"bench-{name}.json"))
    # Memory and a step of a network; the first steps of torch.compile would take most of the time.
    step = Step("benchmark of networks", [], 150, "bench.log", call=2)
    chosen = ["--suite", "networks", "--without", "torch.compile"]
    chosen += [word for row in NETWORKS for word in ("--entries", row)]
    return [*found, _bench(step, folder, *chosen, json="bench-networks.json")]


def third_call(folder: Path) -> list[Step]:
    """compute-sanitizer, which not every machine permits, and ncu."""
    program, profiled = str(HERE / "sanitized.py"), str(HERE / "profiled.py")
    found = []
    for name in ("memcheck", "racecheck", "initcheck"):
        # Libraries query the driver for features that it lacks; such a failed call is no fault of a kernel.
        own = ["--report-api-errors", "no"] if name == "memcheck" else []
        command = [
            tool("compute-sanitizer"),
            "--tool",
            name,
            *own,
            "--error-exitcode",
            str(FOUND),
            sys.executable,
            program,
        ]
        fault = Step(f"{name} finds a planted fault", [*command, "--fault", name], 40, "sanitizer.log", FOUND, call=3)
        found += [
            fault,
            Step(f"{name} of every kind of kernel", command, 90, "sanitizer.log", after=fault.name, call=3),
        ]
    results = [str(KEPT / f"bench-{name}.json") for name in ("activation", "others")]
    command = [sys.executable, profiled, "--ncu", tool("ncu"), *results]
    return [*found, Step("profiles of slow kernels", command, 150, "profiles.log", call=3, spare=1)]


def steps(folder: Path) -> list[Step]:
    """All steps; those with `spare` share the remaining time."""
    return [*first_call(folder), *second_call(folder), *third_call(folder)]


def limit_of(step: Step, later: list[Step], left: float) -> float:
    """Seconds for a step: its limit, and its share of the time that remains when all later steps have their limits."""
    spare, parts = left - step.limit - sum(s.limit for s in later), step.spare + sum(s.spare for s in later)
    return min(step.limit + (max(spare, 0) * step.spare / parts if parts else 0), left)


def _run_in_time(step: Step, folder: Path, chosen: list[Step], ends: float) -> None:
    left = ends - time.monotonic()
    limit = limit_of(step, chosen[chosen.index(step) + 1 :], left)
    step.command = [str(int(max(limit - GRACE - 10, 5))) if part == "BUDGET" else part for part in step.command]
    if left <= GRACE:
        return
    if not shutil.which(step.command[0]):
        step.status = f"there is no {step.command[0]}"
    elif any(s.name == step.after and not s.is_good for s in chosen):
        step.status = f"not run, as this was not good: {step.after}"
    else:
        step.run(folder, limit)
        if step.keeps and (folder / step.keeps).exists():
            shutil.copyfile(folder / step.keeps, KEPT / step.keeps)


def _told(step: Step) -> dict[str, object]:
    told = {"step": step.name, "status": step.status, "good": step.is_good, "seconds": step.seconds}
    return told | ({"said": step.said} if step.said else {})


def main(arguments: list[str] | None = None) -> int:
    """Runs the requested steps; returns 0 if each ended as expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for logs and results; made where it is not there")
    parser.add_argument("--call", type=int, choices=tuple(CALLS), help="one of three (default: all in one)")
    parser.add_argument("--seconds", type=float, help="for all together (default: 290, 540 and 580 for the calls)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="steps with this in their name; repeat")
    given = parser.parse_args(arguments)
    folder: Path = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    KEPT.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in steps(folder) if given.call in (None, s.call)]
    chosen = [s for s in chosen if not given.only or any(text in s.name for text in given.only)]
    ends = time.monotonic() + (given.seconds or sum(CALLS[call] for call in {s.call for s in chosen}))
    if given.call in (None, 1):
        (KEPT / OUTCOMES).unlink(missing_ok=True)  # of an older version
    elif (KEPT / OUTCOMES).exists():  # the file is appended to
        shutil.copyfile(KEPT / OUTCOMES, folder / OUTCOMES)
    for step in chosen:
        step.environment["CUPY_CACHE_DIR"] = str(KEPT / "cupy")  # independent of the home folder
        _run_in_time(step, folder, chosen, ends)
        rows = [_told(s) for s in chosen]
        (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for step in chosen:
        print(f"{'good' if step.is_good else 'BAD '}  {step.name}: {step.status}, {step.seconds} s")
    return 0 if all(s.is_good for s in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
