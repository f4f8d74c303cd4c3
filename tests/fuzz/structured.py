"""Structure-aware fuzzing by seed: valid models with random damage, in supervised worker processes.

    python tests/fuzz/structured.py --first 0 --count 100000 [--seconds 3600] [--hang 30]

A seed that crashes, hangs, takes over 8 GiB or raises anything but an OpGraphError is printed, and its model stored in
findings/. The same seed always gives the same model (with the same onnx version).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

import model_checks  # noqa: E402  # found by the line above
import onnx  # noqa: E402
import random_models  # noqa: E402

_MEMORY = 8 << 30
_BATCH = 100


def case(seed: int) -> tuple[onnx.ModelProto, Any]:
    """The damaged model of a seed, and the random source for its inputs."""
    rng = random_models.seeded(seed)
    model = random_models.random_model(rng)
    return random_models.damaged(model, rng, rng.choice((1, 1, 2, 3, 6))), rng


def _hang(*_: Any) -> None:
    raise TimeoutError("it hangs")


def _batch(first: int, count: int, hang: int, queue: Any) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGALRM, _hang)
    for seed in range(first, first + count):
        queue.put((seed, "started", ""))
        model, rng = case(seed)
        signal.alarm(hang)
        try:
            outcome, text = model_checks.survives(model, rng), ""
        except Exception as error:
            outcome, text = "FOUND", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        signal.alarm(0)
        queue.put((seed, outcome, text))


def main() -> int:
    """Returns 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--hang", type=int, default=30)
    parser.add_argument("--corpus", type=int, default=0, help="write so many right models to corpus/ and stop")
    given = parser.parse_args()
    if given.corpus:
        for seed in range(given.corpus):
            model = random_models.random_model(random_models.seeded(seed), longest=3)
            (HERE / "corpus" / f"{seed}.onnx").write_bytes(model.SerializeToString(deterministic=True))
        return 0
    started, counts, found = time.monotonic(), Counter[str](), []
    seed, end = given.first, given.first + given.count
    while seed < end and time.monotonic() - started < given.seconds:
        queue: Any = multiprocessing.SimpleQueue()
        count = min(_BATCH, end - seed)
        worker = multiprocessing.Process(target=_batch, args=(seed, count, given.hang, queue))
        worker.start()
        current = seed
        while worker.is_alive() or not queue.empty():
            if queue.empty():
                time.sleep(0.05)
                continue
            current, outcome, text = queue.get()
            if outcome == "started":
                continue
            counts[outcome] += 1
            if outcome == "FOUND":
                found.append((current, text))
        worker.join()
        if worker.exitcode:
            found.append((current, f"the process ended with {worker.exitcode}"))
            seed = current + 1
        else:
            seed += count
        if seed % 10000 == 0:
            print(f"up to seed {seed - 1}: {time.monotonic() - started:.0f} s", flush=True)
        for bad, text in found[counts["kept"] :]:
            print(f"seed {bad}: {text}", flush=True)
            model_checks.FINDINGS.mkdir(exist_ok=True)
            (model_checks.FINDINGS / f"seed_{bad}.onnx").write_bytes(case(bad)[0].SerializeToString())
            counts["kept"] += 1
    passed = {name: count for name, count in counts.items() if name not in ("FOUND", "kept")}
    print(f"seeds {given.first} to {seed - 1} in {time.monotonic() - started:.0f} s: {passed}, {len(found)} found")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
