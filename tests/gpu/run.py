"""Everything that needs a GPU, as one command without network: `python tests/gpu/run.py FOLDER`, from a checkout.

What the machine has, the tests, the benchmark, compute-sanitizer with planted faults, in the order of what is worth
most; logs, results as they come and a summary go to FOLDER. Each step has a limit of its own, so that one that hangs
loses only itself, and is asked to end before it is killed: a test run then still says what has failed. Together they
end in time.
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
_ENVIRONMENT = """
import importlib.metadata as metadata, platform, sys
print(sys.version, platform.platform())
for name in "numpy ml_dtypes torch triton cupy-cuda13x cupy-cuda12x onnx onnxruntime networkx scipy pytest".split():
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "-")
import cupy
import shutil
print("compiler", shutil.which("g++") or shutil.which("clang++"))
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

    @property
    def is_good(self) -> bool:
        return self.status == self.expected

    def run(self, folder: Path, limit: float) -> None:
        """Runs it for at most `limit` seconds."""
        print(f"== {self.name} (at most {limit:.0f} s)", flush=True)
        started = time.monotonic()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **self.environment}
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
        self.seconds = round(time.monotonic() - started, 1)
        print(f"   {'as it should be' if self.is_good else f'NOT GOOD: {self.status}'}, {self.seconds} s", flush=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its children, which may outlive it: they hold the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def steps(folder: Path) -> list[Step]:
    """In order of what is worth most; compute-sanitizer, which not every machine lets look, gets what is left."""
    python = sys.executable
    program = str(HERE / "sanitized.py")
    cores = min(12, os.cpu_count() or 1)
    # Other versions of other people's libraries warn, on import too; here that is no failure.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-W", "default", "--durations=15"]
    if importlib.util.find_spec("xdist"):
        options += ["-n", str(cores)]
    if importlib.util.find_spec("pytest_timeout"):  # one that hangs on the GPU loses one worker, not all that follows
        options += ["--timeout", "100", "--timeout-method", "thread"]
    bench = [python, "-m", "opgraph", "bench", "--device", "cuda", "--suite", "gpu", "--budget", "BUDGET"]
    found = [
        Step("environment", [python, "-c", _ENVIRONMENT], 40, "environment.log"),
        # Compiled by all cores into CuPy's cache, for what follows to find.
        Step("every kind of kernel", [python, program, "--threads", str(cores)], 50, "sanitizer.log"),
        Step("tests", [python, "-m", "pytest", str(HERE), *options], 210, "tests.log"),
        Step("benchmark", [*bench, "--json", str(folder / "bench.json")], 250, "bench.log"),
    ]
    # The CPU engine's threads, of every worker, would wait for each other.
    found[2].environment["OMP_NUM_THREADS"] = "2"
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
    step.command = [str(int(max(limit - GRACE - 25, 5))) if part == "BUDGET" else part for part in step.command]
    if left <= GRACE:
        return
    if not shutil.which(step.command[0]):
        step.status = f"there is no {step.command[0]}"
    elif any(s.name == step.after and not s.is_good for s in chosen):
        step.status = f"not run, as this was not good: {step.after}"
    else:
        step.run(folder, limit)


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
    with tempfile.TemporaryDirectory(prefix="opgraph-gpu-", ignore_cleanup_errors=True) as cache:
        for step in chosen:
            step.environment["CUPY_CACHE_DIR"] = cache  # whatever is in the home folder, or if there is none
            _run_in_time(step, folder, chosen, ends)
            rows = [{"step": s.name, "status": s.status, "good": s.is_good, "seconds": s.seconds} for s in chosen]
            (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for step in chosen:
        print(f"{'good' if step.is_good else 'BAD '}  {step.name}: {step.status}, {step.seconds} s")
    return 0 if all(s.is_good for s in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
