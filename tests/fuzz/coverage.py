"""Coverage-guided fuzzing of the reader, the partitioner, the emitter and the writer, with atheris.

    pip install atheris
    python tests/fuzz/coverage.py --seconds 3600 [--corpus FOLDER]

Inputs are files, mutated half as bytes and half as messages. Any exception except an OpGraphError ends libFuzzer's
process; its input is then stored in FOLDER_found, and belongs into findings/. The run continues with another process
until the time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

import atheris  # noqa: E402

with atheris.instrument_imports(include=["opgraph"]):
    import model_checks  # found by the path above
    import onnx
    import random_models
    from google.protobuf.message import DecodeError

    import opgraph.partition.partitioner
    import opgraph.runtime.reference  # noqa: F401
    from opgraph.errors import OpGraphError
    from opgraph.onnx.save import to_model


def one(content: bytes) -> None:
    """Runs one input: read, printed, partitioned, emitted and written. One in sixteen runs every check."""
    if content and content[-1] % 16 == 0:
        model_checks.survives_bytes(content, random_models.seeded(0))
        return
    try:
        graph = model_checks.loaded(onnx.ModelProto.FromString(content))
    except DecodeError:
        return
    if graph is None:
        return
    str(graph)
    model_checks.emits(graph)
    with contextlib.suppress(OpGraphError):
        to_model(graph)


def mutated(content: bytes, size: int, seed: int) -> bytes:
    """The input, half of the time damaged as a message if it is one; otherwise mutated as bytes."""
    rng = random_models.seeded(seed)
    if rng.random() < 0.5:
        model = onnx.ModelProto()
        try:
            model.ParseFromString(content)
        except Exception:  # exceptions of protobuf, of several classes
            return bytes(atheris.Mutate(content, size))
        result = random_models.damaged(model, rng, 1 + rng.randrange(3)).SerializeToString()
        return bytes(result[:size])
    return bytes(atheris.Mutate(content, size))


def found_in(corpus: Path) -> Path:
    """The folder for findings; the corpus itself is run at every start."""
    return corpus.with_name(f"{corpus.name}_found")


def fuzz(seconds: int, corpus: Path) -> None:
    """Fuzzes until the time is up or something is found. Does not return: atheris ends the process."""
    warnings.simplefilter("ignore")
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=30", "-rss_limit_mb=4096",
               f"-artifact_prefix={found_in(corpus)}/"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=mutated)
    atheris.Fuzz()


def main() -> int:
    """Returns 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, default=Path("fuzz_corpus"))
    parser.add_argument("--one-process", action="store_true", help="stop at the first finding")
    given = parser.parse_args()
    given.corpus.mkdir(exist_ok=True)
    found_in(given.corpus).mkdir(exist_ok=True)
    if given.one_process:
        fuzz(given.seconds, given.corpus)
    for path in (HERE / "corpus").glob("*.onnx"):
        shutil.copy(path, given.corpus / path.name)
    end, found = time.monotonic() + given.seconds, 0
    while (left := int(end - time.monotonic())) > 0:
        command = [sys.executable, __file__, "--one-process", "--seconds", str(left), "--corpus", str(given.corpus)]
        found += subprocess.run(command, check=False).returncode != 0
    print(f"{found} found", flush=True)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
