"""Coverage-guided fuzzing of the reader, the partitioner, the emitter and the writer, with atheris.

    pip install atheris
    python tests/fuzz/coverage.py --seconds 3600 [--corpus FOLDER]

Inputs are files, mutated half as bytes and half as messages. Anything but an OpGraphError ends the run; the input
is in the folder then, and belongs into findings/.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
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
    """One input: read, printed, partitioned, emitted and written. One in sixteen goes through everything."""
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
    """The input damaged as a message where it is one, else, and now and then, as bytes."""
    rng = random_models.seeded(seed)
    if rng.random() < 0.5:
        model = onnx.ModelProto()
        try:
            model.ParseFromString(content)
        except Exception:  # protobuf's own, of several classes
            return bytes(atheris.Mutate(content, size))
        result = random_models.damaged(model, rng, 1 + rng.randrange(3)).SerializeToString()
        return bytes(result[:size])
    return bytes(atheris.Mutate(content, size))


def main() -> None:
    """Does not return: atheris ends the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, default=Path("fuzz_corpus"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    given.corpus.mkdir(exist_ok=True)
    for path in (HERE / "corpus").glob("*.onnx"):
        shutil.copy(path, given.corpus / path.name)
    options = [f"-max_total_time={given.seconds}", "-max_len=4096", "-timeout=30", "-rss_limit_mb=4096",
               f"-artifact_prefix={given.corpus}/found_"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(given.corpus)], one, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
