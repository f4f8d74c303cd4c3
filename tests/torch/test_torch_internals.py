"""The stand-ins for private parts of torch give the same results as these parts."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

#: Hides every part of torch that has a stand-in: `getattr` with a default returns the default while the two modules are
#: loaded. Where torch does not report the level of forward-mode differentiation, models run as they were written.
CODE = """
import sys
from importlib.machinery import PathFinder

import torch
from torch import nn

KNOWS_LEVEL = sys.argv[1] == "True"
FILES = ("opgraph.runtime.providers.torch_internals", "opgraph.torch.graph.torch_internals")
loaded = []


class Finder:
    def find_spec(self, name, path, target=None):
        if name not in FILES:
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            module.getattr = lambda owner, name, *default: default[0] if default else getattr(owner, name)
            module.hasattr = lambda owner, name: name == "_current_level" and KNOWS_LEVEL
            load(module)
            del module.getattr, module.hasattr
            loaded.append(name)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
import opgraph.torch as ogt
from opgraph.runtime.providers import torch_internals
from opgraph.torch.graph.backend import observed

assert sorted(loaded) == sorted(FILES)
assert torch_internals.has_storage is not torch._C._has_storage

torch.manual_seed(0)


def act(x, a):
    return torch.where(x > 0, x.to(torch.float32), a * torch.expm1(x)) * torch.sigmoid(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.a = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.a > 0:
            x = x * torch.sigmoid(self.a * x)
        return self.second(x)


def both_derivatives(fn):
    x = torch.linspace(-2, 2, 12).reshape(3, 4).requires_grad_()
    a = torch.linspace(0.5, 1, 4).requires_grad_()
    y = fn(x, a)
    first = torch.autograd.grad((y * y).sum(), (x, a), create_graph=True)
    (one,) = torch.autograd.grad(fn(x, a).sum(), x)
    second = torch.autograd.grad(first[0].sum(), (x, a))
    with torch.autocast("cpu", torch.bfloat16):
        cast = fn(x, a)
    with torch.no_grad():
        plain = fn(x[:2], a)
    return [y, *first, one, *second, cast, plain, *torch.func.jvp(fn, (x, a), (x, a)),
            torch.func.vmap(fn, (0, None))(x, a), torch.func.grad(lambda x: fn(x, a).sum())(x)]


def steps(model):
    made = []
    for rows in (3, 5, 6):
        model.zero_grad()
        y = model(torch.linspace(-1, 1, rows * 6).reshape(rows, 6))
        y.square().sum().backward()
        made += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    return made


def close(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


close(both_derivatives(ogt.fuse(act)), both_derivatives(act))
eager, fused, graphs = Net(), Net(), []
fused.load_state_dict(eager.state_dict())
ogt.fuse(fused)
with observed(graphs.append):
    close(steps(fused), steps(eager))
assert bool(graphs) is KNOWS_LEVEL, graphs
x = torch.randn(3, 6)
assert ogt.saved_tensors(fused, x).totals.kept > 0
assert bool(ogt.explain(fused, x).fused) is KNOWS_LEVEL
assert ogt.check_inplace(eager, x).ok
"""


@pytest.mark.slow
@pytest.mark.parametrize("knows_level", [True, False])
def test_replacements_of_private_torch_functions_agree(knows_level: bool) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(knows_level)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
