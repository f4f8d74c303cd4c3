"""Runs oneDNN's graph files at their own sizes; what test_files_run.py does with smaller tensors.

    python tests/onednn/at_full_size.py [PART_OF_A_NAME] [--limit 6e7]

Files of more elements (plus a hundredth of the products) than the limit are made as much smaller as it says: in float64
the largest takes 13 GB for each copy of its tensors.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from onednn_files import RUNNABLE
from onednn_fill import feeds_of
from onednn_run import mistakes, prepared
from onednn_shrink import work_of


def main() -> int:
    parser = argparse.ArgumentParser(description="oneDNN's graph files at their own sizes")
    parser.add_argument("part", nargs="?", default="", help="part of a file's name")
    parser.add_argument("--limit", type=float, default=6e7, help="work that a file may take")
    args = parser.parse_args()
    wrong = smaller = 0
    for name in [n for n in RUNNABLE if args.part in n]:
        start = time.monotonic()
        graph = prepared(name, None)
        is_smaller = work_of(graph) > args.limit
        if is_smaller:
            graph = prepared(name, args.limit)
        found = mistakes(graph, feeds_of(graph))
        wrong += bool(found)
        smaller += is_smaller
        note = " (made smaller)" if is_smaller else ""
        print(f"{time.monotonic() - start:6.1f} s  {'WRONG' if found else 'right'}  {name}{note}", flush=True)
        for line in found:
            print(f"    {line}")
    print(f"{wrong} wrong, {smaller} made smaller")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
