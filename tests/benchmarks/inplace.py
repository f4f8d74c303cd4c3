"""The memory that in-place activations save: bytes that torch allocates, counted per storage.

    python tests/benchmarks/inplace.py [--json FILE]

ReLU on 10000 x 10000 f32 values, and one training run of a 784-256-128-64-10 classifier with the activations in place
and out of place: its losses, the total allocation of one step, and the peak of its forward pass. (The peak of the whole
step is that of backward, where in both cases the gradient of the widest layer is alive together with ReLU's output.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MIB = 1 << 20


class Allocations(TorchDispatchMode):
    """Bytes of the storages that ops make in this mode: all, those alive, and the peak of those alive."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.total += size
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def relu(n: int = 10_000) -> dict[str, int]:
    """Bytes that ReLU on n x n f32 values allocates; no real memory is needed to count them."""
    result = {}
    with FakeTensorMode():
        for inplace in (False, True):
            x = torch.empty(n, n)
            with Allocations() as seen:
                nn.functional.relu(x, inplace=inplace)
            result["in place" if inplace else "out of place"] = seen.total
    return result


@dataclass
class Run:
    """The losses of a training run, and the bytes of one step."""

    losses: list[float]
    allocated: int
    forward_peak: int
    peak: int


def classifier(inplace: bool, batch: int = 1024, steps: int = 5) -> Run:
    """Some SGD steps of a 784-256-128-64-10 classifier with ReLU."""
    torch.manual_seed(0)
    widths = [784, 256, 128, 64]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU(inplace=inplace)]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    images, labels = torch.randn(batch, 784), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run([], 0, 0, 0)
    for _ in range(steps):
        optimizer.zero_grad()
        with Allocations() as seen:
            loss = nn.functional.cross_entropy(model(images), labels)
            run.forward_peak = seen.peak
            loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        run.allocated, run.peak = seen.total, seen.peak
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    allocated = relu()
    for name, size in allocated.items():
        rounded = -(-size // (2 * MIB)) * 2  # the CUDA allocator's large blocks are multiples of 2 MiB
        print(f"ReLU on 10000 x 10000 f32, {name}: {size / MIB:.1f} MiB, {rounded} MiB on a GPU")
    runs = {name: classifier(inplace) for name, inplace in (("out of place", False), ("in place", True))}
    for name, run in runs.items():
        print(
            f"784-256-128-64-10, batch 1024, {name}: one step allocates {run.allocated / MIB:.2f} MiB, forward peak "
            f"{run.forward_peak / MIB:.2f} MiB, last loss {run.losses[-1]:.6f}"
        )
    print("losses are equal" if runs["in place"].losses == runs["out of place"].losses else "losses differ")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"relu": allocated, "classifier": {name: asdict(run) for name, run in runs.items()}}, file, indent=1
            )


if __name__ == "__main__":
    main()
