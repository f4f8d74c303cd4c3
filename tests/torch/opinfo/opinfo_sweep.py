"""PyTorch's OpInfo database through opgraph.torch, against eager torch: `python tests/torch/opinfo/opinfo_sweep.py`.

Every op, alone and amid arithmetic, in each way of capture: forward, gradients, second derivatives, dtypes, forms and
layouts, and calls that torch refuses. Each op has one line of output, and its findings are printed below it.

    python tests/torch/opinfo/opinfo_sweep.py --interpret --log all.jsonl    # records in the log are not run again
    python tests/torch/opinfo/opinfo_sweep.py --dtypes float32 --shard 0/8
    python tests/torch/opinfo/opinfo_sweep.py --ops clamp,nn.functional.gelu --ways module
    python tests/torch/opinfo/opinfo_sweep.py --modules --interpret          # the ModuleInfo database
    python tests/torch/opinfo/opinfo_sweep.py --summary all.jsonl other.jsonl

With `--interpret` nothing is compiled: kernels' loops are run op by op (`opinfo_interpreted.py`), many times faster.

Of calls that differ only in the values of tensors, one is run (`opinfo_calls.distinct`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]

from opinfo_calls import DTYPES, all_ops, dtypes_of
from opinfo_findings import Sweep
from opinfo_interpreted import interpreted
from opinfo_modules import MODULE_DTYPES, ModuleSweep, all_modules
from opinfo_refusals import TABLE
from opinfo_ways import WAYS


def chosen(ops: list[Any], names: str, shard: str) -> list[Any]:
    """Ops or modules with the given names, or a shard of all: "k/n" is every n-th from the k-th."""
    part, parts = map(int, shard.split("/"))
    if names:
        wanted = names.split(",")
        ops = [op for op in ops if op.formatted_name in wanted or op.name in wanted]
    return ops[part::parts]


def swept(sweep: Sweep, op: Any, dtype: torch.dtype, checks: str) -> dict[str, Any]:
    """The log record of one op in one dtype."""
    start, used, calls, ran, before = (
        time.monotonic(),
        time.process_time(),
        sweep.calls,
        sweep.ran,
        sweep.refused.copy(),
    )
    sweep.fused.clear()
    found = list(sweep.findings(op, [dtype], checks))
    return {
        "op": op.formatted_name,
        "dtype": str(dtype).removeprefix("torch."),
        "ways": ",".join(sweep.ways),
        "checks": checks,
        "most": sweep.most,
        "calls": sweep.calls - calls,
        "runs": sweep.ran - ran,
        "seconds": round(time.monotonic() - start, 1),
        "processor_seconds": round(time.process_time() - used, 1),
        "fused": sorted(sweep.fused),
        "refused": [[TABLE.index(row), n] for row, n in (sweep.refused - before).items()],
        "found": [[f.kind, str(f)] for f in found],
    }


def line_of(record: dict[str, Any], most: int) -> str:
    """A record as one line of text, with at most `most` findings of each kind below it."""
    kinds = collections.Counter(kind for kind, _ in record["found"])
    told = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    lines = [f"{record['op']} {record['dtype']}: {record['runs']} runs, {record['seconds']} s. {told}"]
    shown: collections.Counter[str] = collections.Counter()
    for kind, text in record["found"]:
        shown[kind] += 1
        if shown[kind] <= most:
            lines.append("    " + text.replace("\n", " | "))
    return "\n".join(lines)


def summary(records: list[dict[str, Any]]) -> str:
    """The runs by dtype, the findings, and the number of findings that each row of the table of refusals lists."""
    lines = []
    for dtype in sorted({r["dtype"] for r in records}):
        some = [r for r in records if r["dtype"] == dtype]
        calls, runs, seconds = (sum(r[name] for r in some) for name in ("calls", "runs", "processor_seconds"))
        ops = len({r["op"] for r in some})
        lines.append(f"{dtype}: {ops} ops, {calls} calls, {runs} runs, {seconds / 60:.0f} processor minutes")
    met: collections.Counter[int] = collections.Counter()
    for record in records:
        met.update(dict(record["refused"]))
    lines += [f"{met[i]} refused: {row.says} [{row.reason}]" for i, row in enumerate(TABLE)]
    kinds = collections.Counter(kind for r in records for kind, _ in r["found"])
    total = sum(r["runs"] for r in records)
    return "\n".join([*lines, f"{total} runs: " + (", ".join(f"{n} {k}" for k, n in kinds.items()) or "nothing found")])


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """The command; its exit status is 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="names, with commas between them; all where there are none")
    parser.add_argument("--modules", action="store_true", help="the modules of ModuleInfo instead of ops")
    parser.add_argument("--dtypes", default="", help="all where there are none")
    parser.add_argument("--ways", default="", help="which, of " + ", ".join(WAYS))
    parser.add_argument(
        "--checks",
        default="fgse",
        help="letters: forward, gradients, second derivatives, errors, turned inputs, other layouts, gradients partly",
    )
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="every N-th op from the K-th")
    parser.add_argument("--most", type=int, default=None, help="inputs of each source; all where this is left out")
    parser.add_argument("--lines", type=int, default=3, help="findings printed of each op and kind")
    parser.add_argument("--interpret", action="store_true", help="compile nothing: run kernels' loops op by op")
    parser.add_argument("--log", type=Path, help="a file to add records to; what it has is not run again")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="LOG", help="print the findings and sums of logs")
    given = parser.parse_args()
    if given.summary:
        records = [r for path in given.summary for r in read_log(path)]
        for record in records:
            if record["found"]:
                print(line_of(record, given.lines))
        print(summary(records))
        return 0
    records = read_log(given.log) if given.log else []
    known = {(r["op"], r["dtype"], r["ways"], r["checks"], r["most"]) for r in records}
    given.ways = given.ways or ("module" if given.modules else "function,module")
    sweep = (ModuleSweep if given.modules else Sweep)(given.ways.split(","), given.most)
    wanted = given.dtypes.split(",") if given.dtypes else [str(d).removeprefix("torch.") for d in DTYPES]
    with interpreted() if given.interpret else contextlib.nullcontext():
        ops = chosen(all_modules() if given.modules else all_ops(), given.ops, given.shard)
        for name in wanted:
            dtype = getattr(torch, name)
            for op in ops:
                key = op.formatted_name, name, given.ways, given.checks, given.most
                known_dtypes = MODULE_DTYPES if given.modules else dtypes_of(op)
                if dtype not in known_dtypes or key in known:
                    continue
                record = swept(sweep, op, dtype, given.checks)
                records.append(record)
                print(line_of(record, given.lines), flush=True)
                if given.log:
                    with given.log.open("a") as log:
                        log.write(json.dumps(record) + "\n")
    print(summary(records))
    return 1 if any(r["found"] for r in records) else 0


if __name__ == "__main__":
    sys.exit(main())
