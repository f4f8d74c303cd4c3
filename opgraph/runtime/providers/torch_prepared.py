"""Prepared calls: for tensors of one signature, a Python function that only allocates, takes addresses and launches.

A signature is the data that torch's own guards compare in one call into C++ (0.1 us for two tensors): the classes of
tensors, their dtypes, devices, sizes and strides, whether they require gradients, and state that changes torch's
dispatch (autocast, inference mode, torch.func). It does not include whether gradients are recorded. The function is
generated, because loops over operands would cost more than their bodies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, MappingProxyType
from typing import Any, TypeAlias

import torch

from opgraph.runtime import huge_pages, memory_pool
from opgraph.runtime.cpu_kernel import HostKernel
from opgraph.runtime.kernel_sequence import KernelLaunch, KernelSequence
from opgraph.runtime.providers.torch import to_numpy
from opgraph.runtime.providers.torch_internals import TensorGuards, dispatch_modes, empty_cpu, forward_ad
from opgraph.runtime.runner import Runner

Tensors: TypeAlias = Sequence[torch.Tensor]
#: Runs on the tensors of a signature; returns a tensor if there is one result, else a tuple.
Run: TypeAlias = Callable[..., Any]
#: Returns True if tensors have a signature.
Check: TypeAlias = Callable[..., bool]

#: The number of signatures that are compared one after the other before a call is looked up by a Python key.
MAX_READY = 8


def is_plain() -> bool:
    """True if no state is active that a signature does not include: a level of forward-mode gradients, a mode."""
    return forward_ad._current_level < 0 and not dispatch_modes()


#: The same as text, for generated functions, and the values that it uses.
IS_PLAIN = "forward_ad._current_level < 0 and not modes()"
IS_PLAIN_VALUES: Mapping[str, Any] = MappingProxyType({"forward_ad": forward_ad, "modes": dispatch_modes})


def check_of(tensors: Tensors) -> Check | None:
    """Returns a function that checks if tensors have the signature of these; None if torch has no guards.

    The function accepts any object in the place of a tensor, except nested tensors: torch's guards would end the
    process (they query strides where nothing may be raised). It returns False if one tensor is given twice.
    """
    if TensorGuards is None or len({id(t) for t in tensors}) < len(tensors):
        return None
    check: Check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@dataclass(frozen=True, slots=True)
class Statements:
    """The lines of a function that runs a program on tensors of a signature.

    Attributes:
        lines: Python statements.
        results: the names of the results.
        values: the other values that the lines use.
    """

    lines: tuple[str, ...]
    results: tuple[str, ...]
    values: Mapping[str, Any]

    def function(self, parameters: Sequence[str], returned: Sequence[str] | None = None) -> Run:
        """Returns the function with these parameters.

        Args:
            returned: names in the tuple that it returns; by default the results, a single one without a tuple.
        """
        given = self.results if returned is None else returned
        text = given[0] if returned is None and len(given) == 1 else f"({''.join(f'{r}, ' for r in given)})"
        return defined("prepared", parameters, (*self.lines, f"return {text}"), self.values)


def defined(name: str, parameters: Sequence[str], lines: Sequence[str], values: Mapping[str, Any]) -> Run:
    """Compiles a Python function from its lines."""
    body = "".join(f"    {line}\n" for line in lines)
    names = dict(values)
    exec(_compiled(f"def {name}({', '.join(parameters)}):\n{body}", name), names)
    made: Run = names[name]
    return made


@lru_cache(maxsize=1024)  # for tensors of other sizes, only the values differ
def _compiled(text: str, name: str) -> CodeType:
    return compile(text, f"<{name}>", "exec")


def tensor_names(count: int) -> tuple[str, ...]:
    """The names of a call's tensors in generated functions."""
    return tuple(f"t{i}" for i in range(count))


def result_names(count: int) -> tuple[str, ...]:
    """The names of a call's results in generated functions."""
    return tuple(f"r{i}" for i in range(count))


def kernel_statements(
    runner: Runner,
    reads: Sequence[int],
    writes: Sequence[int],
    tensors: Tensors,
    outs: Tensors,
    names: Sequence[str],
    otherwise: Callable[[Tensors], Sequence[torch.Tensor]],
) -> Statements | None:
    """The statements of a partition that is a whole program; None if it is no kernel that can be prepared.

    Args:
        reads, writes: positions of the tensors and results that it reads and writes.
        tensors: example tensors, with `names`.
        outs: example results.
        otherwise: runs the program on other tensors of the signature: on a GPU, those that a kernel for aligned memory
            does not support.
    """
    results = result_names(len(outs))
    if isinstance(runner, HostKernel):
        return _on_host(runner, reads, writes, tensors, outs, names, results)
    if "opgraph.runtime.cuda_kernel" in sys.modules:
        from opgraph.runtime.cuda_kernel import CudaKernel  # needs CuPy
        from opgraph.runtime.providers.torch_cuda_prepared import on_device

        if isinstance(runner, CudaKernel):
            return on_device(runner, reads, writes, tensors, outs, names, results, otherwise)
    return None


def _on_host(
    kernel: HostKernel,
    reads: Sequence[int],
    writes: Sequence[int],
    tensors: Tensors,
    outs: Tensors,
    names: Sequence[str],
    results: tuple[str, ...],
) -> Statements:
    """The statements of one kernel on the CPU, launched by address."""
    plan = kernel.plan([to_numpy(tensors[i]) for i in reads], [to_numpy(outs[i]) for i in writes])
    lines: list[str] = []
    values: dict[str, Any] = {}
    for result, out in zip(results, outs, strict=True):
        line, more = _allocation(result, out)
        lines.append(line)
        values |= more
    if plan.size == 0:
        lines += [f"{result}.zero_()" for result in results]
        return Statements(tuple(lines), results, values)
    operands = [names[reads[i]] for i in kernel.reads] + [results[i] for i in writes]
    launch = KernelLaunch(plan, tuple((place, 0) for place in range(len(operands))))
    sequence = KernelSequence([launch], len(operands))
    addresses = ", ".join(f"{name}.data_ptr()" for name in operands)
    values["launch"] = sequence  # keeps the memory that the packed call points to
    if sequence.direct is not None:
        values["entry"], values["pack"] = sequence.direct
        lines.append(f"entry(pack({addresses}))")
    else:
        lines.append(f"launch({addresses})")
    return Statements(tuple(lines), results, values)


def _allocation(name: str, out: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """The statement that allocates a result on the CPU like this one, and the values that it uses."""
    size, whole = out.nbytes, out.untyped_storage().nbytes()
    shape, strides, dtype = tuple(out.shape), out.stride(), out.dtype
    if size < huge_pages.LARGE:
        values = {"empty": empty_cpu, f"{name}_shape": shape, f"{name}_strides": strides, f"{name}_dtype": dtype}
        return f"{name} = empty({name}_shape, {name}_strides, {name}_dtype)", values
    if memory_pool.is_kept(size):
        return f"{name} = {name}_made()", {f"{name}_made": partial(of_spare_memory, whole, dtype, shape, strides)}

    def make_large() -> torch.Tensor:
        made = empty_cpu(shape, strides, dtype)
        huge_pages.advise(made.data_ptr(), size)
        return made

    return f"{name} = {name}_made()", {f"{name}_made": make_large}


def of_spare_memory(size: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Allocates a large result on the CPU, not yet written. Its storage, of `size` bytes, cannot be resized."""
    try:
        memory = memory_pool.array(size)
    except OSError:  # no memory: torch uses the memory given back, or raises its own error
        memory_pool.empty_cache()
        return torch.empty_strided(shape, strides, dtype=dtype)
    storage = torch.from_numpy(memory).untyped_storage()
    # `set_` and not a view: a result that is a view must not be written in place.
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)
