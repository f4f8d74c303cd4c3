"""The statements of a prepared call of a GPU kernel: addresses, allocation by torch, the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from opgraph.runtime import cuda
from opgraph.runtime.cuda_kernel import CudaKernel
from opgraph.runtime.cuda_sequence import CudaSequence
from opgraph.runtime.kernel_sequence import KernelLaunch
from opgraph.runtime.providers import torch_internals
from opgraph.runtime.providers.torch_prepared import Statements, Tensors

#: In a block `with on_gpu(device):`, torch allocates and kernels are launched on that device.
on_gpu: Callable[[int], AbstractContextManager[Any]] = torch.cuda.device


def on_device(
    kernel: CudaKernel,
    reads: Sequence[int],
    writes: Sequence[int],
    tensors: Tensors,
    outs: Tensors,
    names: Sequence[str],
    results: tuple[str, ...],
    otherwise: Callable[[Tensors], Sequence[torch.Tensor]],
) -> Statements | None:
    """The statements of one kernel; None if there is nothing to compute, or the kernel's work cannot be prepared.

    Args:
        reads, writes: positions of the tensors and results that the kernel reads and writes.
        tensors: example tensors, with `names`.
        outs: example results, with the names `results`.
        otherwise: runs the program on tensors that are not aligned to 16 bytes, on another current GPU, or in a forked
            process, which it refuses.
    """
    plan = kernel.plan([tensors[i].detach() for i in reads], [outs[i] for i in writes], aligned=True)
    if not plan.launches or plan.cleared:
        return None
    read = [names[reads[i]] for i in kernel.reads]
    launch = KernelLaunch(plan, tuple((place, 0) for place in range(len(plan.moving))))
    sequence = CudaSequence([launch], len(plan.moving), kernel.device)
    values: dict[str, Any] = {
        "cuda": cuda, "current": torch_internals.current_gpu, "stream": torch_internals.current_stream,
        "empty": torch_internals.empty_cuda, "otherwise": otherwise, "launch": sequence,
    }  # fmt: skip
    addresses = {name: f"a{i}" for i, name in enumerate(dict.fromkeys(read))}
    lines = [f"{address} = {name}.data_ptr()" for name, address in addresses.items()]
    packed = [addresses[name] for name, packs in zip(read, plan.packs) if packs]
    conditions = [f"({' | '.join(dict.fromkeys(packed))}) & 15"] if packed else []
    lines.append(f"if {' or '.join([*conditions, 'cuda.forked', f'current() != {kernel.device}'])}:")
    lines.append(f"    {''.join(f'{r}, ' for r in results)} = otherwise(({''.join(f'{n}, ' for n in names)}))")
    lines.append("else:")
    for result, out in zip(results, outs, strict=True):
        lines.append(f"    {result} = empty({result}_shape, {result}_strides, {result}_dtype)")
        looks = {"shape": tuple(out.shape), "strides": out.stride(), "dtype": out.dtype}
        values |= {f"{result}_{what}": value for what, value in looks.items()}
    given = [addresses[name] for name in read] + [f"{results[i]}.data_ptr()" for i in writes]
    if sequence.workspace:
        lines.append(f"    work = empty(({sequence.workspace},), (1,), bytes_dtype)")
        values["bytes_dtype"] = torch.uint8
        given.append("work.data_ptr()")
    call = f"stream({kernel.device}), {', '.join(given)}"
    if sequence.direct is not None:
        values["entry"], values["pack"] = sequence.direct
        lines.append(f"    if refused := entry(pack({call})): launch.recover(refused, {call})")
    else:
        lines.append(f"    launch({call})")
    return Statements(tuple(lines), results, values)
