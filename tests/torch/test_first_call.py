"""The cost of the import and of a function's first call: no unneeded module is loaded, no unneeded kernel compiled."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

#: Modules that take 0.05 to 1 s to load. They are easily loaded by mistake: a comparison on the meta device loads all
#: of torch's compiler, torch.broadcast_shapes loads sympy, torch.onnx.is_in_onnx_export() the exporter.
COSTLY = ("torch._dynamo", "sympy", "torch.onnx", "networkx")
CODE = f"""
import json, sys, torch
before = set(sys.modules)
import opgraph.torch as ogt
from opgraph.torch.naf1 import with_order
from opgraph.runtime import cpu_compiler
module, x = with_order(0.9), torch.randn(1000, requires_grad=True)
fused = ogt.fuse(module.forward)
fused(x).sum().backward()
costly = [name for name in {COSTLY} if name in sys.modules and name not in before]
kernels = lambda: sum(entry.__name__ != 'og_sequence' for entry in cpu_compiler._loaded.values())  # which launches them
after_sum = kernels()
torch.autograd.grad(fused(x), x, torch.ones(1000))  # for which torch itself loads sympy
print(json.dumps([costly, after_sum, kernels()]))
"""


@pytest.fixture(scope="module")
def first_call(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The costly modules and the number of kernels that are loaded after NAF1's first forward and backward."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def test_import_and_first_call_load_no_costly_module(first_call: list[object]) -> None:
    assert first_call[0] == []


def test_gradient_of_sum_needs_two_kernels_and_dense_gradient_a_third(first_call: list[object]) -> None:
    assert first_call[1:] == [2, 3]
