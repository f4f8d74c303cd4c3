"""A torch that is too new is refused by name at the import, not by what is missing in it."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import torch
torch.autograd.Function.apply = classmethod(len).__get__(None, type)  # calls no Python, as from torch 2.14 on
try:
    import opgraph.torch
except ImportError as error:
    print(error)
"""


def test_a_torch_that_calls_functions_from_c_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    what, where, fix = done.stdout.splitlines()
    assert "calls autograd.Functions from C" in what
    assert where == "  where: import opgraph.torch"
    assert fix.startswith("  fix:   pip install 'torch>=2.11,<2.14'")
