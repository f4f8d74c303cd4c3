"""The CPU figures of the README: `opgraph bench` on the entries that it shows.

python tests/benchmarks/cpu.py [--json FILE] [more options of `opgraph bench`]
"""

from __future__ import annotations

import sys

from opgraph.cli import main

ENTRIES = ("swish", "swish, alpha 1.702", "swish, alpha per channel", "fractional (NAF1)", "chain of 12", "chain of 60")

if __name__ == "__main__":
    command = ["bench", "--suite", "activation", "--suite", "chain", "--suite", "host", "--suite", "compile"]
    for name in ENTRIES:
        command += ["--entries", name]
    sys.exit(main([*command, "--sizes", "1M,32M", *sys.argv[1:]]))
