"""The private parts of torch that captured graphs use, each with what stands in for it where a torch lacks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided_cpu
except ImportError:  # a torch without it allocates by its public function, which takes three times as long

    def empty_strided_cpu(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without values, in host memory."""
        return torch.empty_strided(size, stride, dtype=dtype)


try:
    from torch._C._dynamo.guards import _reinterpret_tensor as reinterpret_tensor
except ImportError:

    def reinterpret_tensor(base: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        """The memory of a tensor read in another way; `offset` elements after its own beginning."""
        return base.as_strided(size, stride, base.storage_offset() + offset)


def without_modes() -> Any:
    """A context in which torch calls run for real: compilers are called under fake tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def aot_backend(**arguments: Any) -> Callable[..., Any]:
    """AOTAutograd as a backend of torch.compile.

    Args:
        arguments: compilers of forward and backward graphs, the partitioner, decompositions; see
            `torch._dynamo.backends.common.aot_autograd`.
    """
    from torch._dynamo.backends.common import aot_autograd

    made: Callable[..., Any] = aot_autograd(**arguments)
    return made


def hint(size: Any) -> int:
    """A size as a number; of a symbolic one the size that it was traced with, without fixing it."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return 4096 if known is None else int(known)
    return int(size)


def without_hook_guards_skipped() -> Any:
    """A context in which Dynamo's guards see hooks that are added to a submodule later."""
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)


def is_transformed() -> bool:
    """Whether something looks on that must see a module's own forward: compilers, exporters, tracers, transforms."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    )
