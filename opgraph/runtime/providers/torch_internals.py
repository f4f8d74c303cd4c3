"""The private parts of torch that calls use, each with a substitute for torch versions that lack it.

The private parts of torch's compilers are in `opgraph/torch/graph/torch_internals.py`. Names are bound at import, most
of them to torch's own objects, so a call costs no more than torch's. A substitute may be slower, or refuse more. Its
results are the same, except that hooks on all modules and saved-tensor hooks are not detected if torch does not list
them. `tests/test_layering.py` checks that no other module uses private parts of torch. Private attributes of objects
that torch returns (`storage._cdata`, `tensor._version`, `op._schema`, `module._modules`) are read where needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType
from typing import Any

import torch

# These have no substitute: the only classes with which torch computes without data, the only mode that intercepts every
# op, the only registry of containers that modules return, the only way to define a custom op under torch.func.
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode",
    "HigherOrderOperator", "OpOverload", "OpOverloadPacket", "TorchDispatchMode",
    "enable_single_level_autograd_function", "tree_flatten", "tree_iter", "tree_leaves", "tree_map", "tree_map_only",
    "tree_unflatten", "unset_fake_temporarily",
]  # fmt: skip

_C: Any = torch._C
_jit: Any = torch.jit  # untyped
_guards: Any = getattr(getattr(_C, "_dynamo", None), "guards", None)

# -- Memory. Inductor's programs allocate with these, which parse no arguments.

#: `empty_cpu(shape, strides, dtype)`: a new tensor on the CPU.
empty_cpu: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cpu", None) or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
)
#: The same on the current GPU.
empty_cuda: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cuda", None) or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
)
#: `reinterpret_tensor(base, size, stride, offset)`: a view of a tensor's memory with another size and stride, `offset`
#: elements after its own beginning.
reinterpret_tensor: Callable[..., torch.Tensor] = getattr(_guards, "_reinterpret_tensor", None) or (
    lambda base, size, stride, offset: base.as_strided(size, stride, base.storage_offset() + offset)
)
#: torch's own guards, which compare tensors in one call into C++; without them calls are looked up by a Python key.
TensorGuards: Any = getattr(_guards, "TensorGuards", None)


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


has_storage: Callable[[torch.Tensor], bool] = getattr(_C, "_has_storage", _has_storage)
#: True for zeros without memory, as derivatives of `torch.func.jvp` may be.
is_zero_tensor: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "_is_zerotensor", lambda tensor: False)
#: The broadcast shape of two shapes.
broadcast_of_two: Callable[[torch.Size, torch.Size], torch.Size] = getattr(_C, "_infer_size", torch.broadcast_shapes)
foreach_add_: Any = getattr(torch, "_foreach_add_", torch.ops.aten._foreach_add_)
foreach_copy_: Any = getattr(torch, "_foreach_copy_", torch.ops.aten._foreach_copy_)

# -- The current GPU. `None` where torch is built without CUDA.

#: `current_stream(device)`: the address of torch's current stream.
current_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)
#: `current_gpu()`: the GPU on which torch allocates. The runtime, and so CuPy, may return another one: at the end of
#: `torch.cuda.device(...)`, torch delays the switch back to a device that it has not used yet.
current_gpu: Any = getattr(_C, "_cuda_getDevice", None)
if torch.version.cuda is not None:
    current_stream = current_stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)
    current_gpu = current_gpu or torch.cuda.current_device

# -- The context of a call.

#: The number of active modes that intercept every op.
dispatch_modes: Callable[[], int] = getattr(
    _C, "_len_torch_dispatch_stack", lambda: len(_get_current_dispatch_mode_stack())
)
_function_mode_stack: Callable[[], Sequence[object]] = _get_current_function_mode_stack
#: The number of active modes that intercept every function of torch.
function_modes: Callable[[], int] = getattr(_C, "_len_torch_function_stack", lambda: len(_function_mode_stack()))


def has_only_default_devices() -> bool:
    """True if each of these modes only sets the default device."""
    return all(type(mode) is DeviceContext for mode in _function_mode_stack())


transforms_active: Callable[[], bool] = getattr(
    _C, "_are_functorch_transforms_active", lambda: _C._functorch.maybe_current_level() is not None
)
#: None if `torch.jit.trace` is not running.
tracing_state: Callable[[], Any] = getattr(_C, "_get_tracing_state", lambda: _jit.is_tracing() or None)
is_fx_tracing: Callable[[], bool] = torch.fx._symbolic_trace.is_fx_symbolic_tracing


class _AtSomeLevel:
    """For a torch without the level of forward-mode differentiation: calls use the dispatcher, which is slow."""

    _current_level = 0


#: `forward_ad._current_level` is below 0 without forward-mode differentiation.
forward_ad: Any = torch.autograd.forward_ad if hasattr(torch.autograd.forward_ad, "_current_level") else _AtSomeLevel


#: A context in which neither modes nor tensor subclasses intercept torch functions. torch's manual documents it.
without_torch_function: Callable[[], AbstractContextManager[object]] = _C.DisableTorchFunction


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree of lists, tuples, dicts and other containers that modules return."""
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def without_modes() -> Any:
    """A context in which torch calls compute real data: compilers are called under modes of fake tensors."""
    return _disable_current_modes()


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The mode of fake tensors among values, a context in which torch computes with them; None if there are none."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def is_tracing() -> bool:
    """True if Dynamo or AOTAutograd is compiling now; False if compiled code is running."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def is_transformed() -> bool:
    """True if a component that must see a module's own forward is active: compilers, exporters, tracers, transforms,
    forward-mode differentiation, hooks on all modules."""
    return bool(
        _is_compiling()
        or tracing_state() is not None
        or transforms_active()
        or (dispatch_modes() and (_mode(_PROXY) is not None or _mode(_FUNCTIONAL) is not None))
        or is_fx_tracing()
        or any(_hooks_on_all)
        or is_forward_mode()
    )


def clones_saved_tensors() -> bool:
    """True inside `torch.autograd.graph.allow_mutation_on_saved_tensors`, which clones saved tensors before torch's own
    in-place ops write into them."""
    return bool(getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False))


def is_forward_mode() -> bool:
    """True if forward-mode differentiation is active: tensors may have tangents, which kernels do not read."""
    return bool(forward_ad._current_level >= 0)


def is_batched() -> bool:
    """True if a transform of torch.func or `autograd.grad(is_grads_batched=True)` is active: tensors may be batches,
    and have no memory of their own."""
    return bool(transforms_active() or _includes(_BATCHES))


def has_saved_tensors_hooks() -> bool:
    """True if hooks get the tensors that autograd saves: of `saved_tensors_hooks`, or of activation checkpointing."""
    return _saved_tensors_hooks(True) is not None


_is_compiling = torch.compiler.is_compiling
_hooks_on_all: list[Any] = [
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks", ())
    for kind in ("forward_pre", "forward", "backward_pre", "backward")
]
_mode, _PROXY, _FUNCTIONAL = _C._get_dispatch_mode, _C._TorchDispatchModeKey.PROXY, _C._TorchDispatchModeKey.FUNCTIONAL
_includes, _BATCHES = _C._dispatch_tls_is_dispatch_key_included, _C._dispatch_key_parse("VmapMode")
_saved_tensors_hooks: Any = getattr(_C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None)

# -- Autograd.

#: The class of nodes that plain autograd and one level of torch.func record; the public class adds torch.func.
SingleLevelFunction: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function.__base__)
_saves: Any = getattr(torch.autograd.function.FunctionCtx.save_for_backward, "__code__", None)
_KEEP = "{}.to_save = ({})" if _saves is not None and "to_save" in _saves.co_names else "{}.save_for_backward({})"


def keep(ctx: str, names: Sequence[str]) -> str:
    """The statement that saves tensors in a node, all by name: the effect of `save_for_backward`, without a call."""
    return _KEEP.format(ctx, "".join(f"{name}, " for name in names))


def enter_directly(function: Any, backward: Callable[..., Any]) -> None:
    """Makes the engine enter the backward pass of a node class without torch's lookup, two Python functions."""
    node: Any = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = backward


#: Returns True if the running backward pass runs a node. Without it all gradients are computed, needed or not.
will_execute: Callable[[Any], bool] = getattr(_C, "_will_engine_execute_node", lambda node: True)
#: The node that runs in a backward pass, and the number of the next node. Without them reports name fewer places.
current_node: Callable[[], Any] = getattr(_C, "_current_autograd_node", lambda: None)
next_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
# torch's own custom ops continue to kernels with these (`torch/_library/autograd.py`). They have no substitute.
below_autograd, after_autograd = _C._AutoDispatchBelowAutograd, _C._after_autograd_keyset
#: A context in which tangents are recorded, or not: a level of torch.func runs without those below it. No substitute.
tangents_enabled: Any = torch.autograd.forward_ad._set_fwd_grad_enabled


def recomputing_once() -> AbstractContextManager[object]:
    """A context in which reads of a region under `torch.utils.checkpoint` recompute it once, not for each tensor."""
    group = getattr(checkpoint, "GraphExecGroup", None)
    if group is None or group._get_current_group() is not None:
        return nullcontext()
    made: AbstractContextManager[object] = group()
    return made


# -- State that a trace of a function reads.


def _without_autocast() -> AbstractContextManager[object]:
    context = ExitStack()
    for device in ("cpu", "cuda"):
        context.enter_context(torch.autocast(device, enabled=False))
    return context


without_autocast: Callable[[], AbstractContextManager[object]] = getattr(_C, "_DisableAutocast", _without_autocast)


def _device_and_dtype(*given: Any, **named: Any) -> tuple[torch.device | None, torch.dtype | None]:
    values = [v for v in (*given, *named.values()) if type(v) is not bool]
    dtype = next((v for v in values if isinstance(v, torch.dtype)), None)
    return next((torch.device(v) for v in values if not isinstance(v, (torch.dtype, type(None)))), None), dtype


#: Returns the device and the dtype in the arguments of `tensor.to` (each may be None), then more values.
device_and_dtype: Callable[..., Any] = getattr(getattr(_C, "_nn", None), "_parse_to", _device_and_dtype)
#: torch's other module of network functions, besides `torch.nn.functional`.
nn_functions: Any = getattr(_C, "_nn", torch.nn.functional)
#: `make_subclass(cls, tensor)`: a tensor of a class on the memory of another one.
make_subclass: Callable[..., Any] = getattr(torch.Tensor, "_make_subclass", lambda cls, tensor: tensor.as_subclass(cls))
_callers = [getattr(torch.nn.Module, name).__code__ for name in ("_slow_forward", "_call_impl")]
#: The code in nn.Module that calls `forward`.
MODULE_CALLERS = {*_callers, *(c for code in _callers for c in code.co_consts if isinstance(c, CodeType))}


def set_cudnn(allow_tf32: bool, deterministic: bool) -> None:
    """Sets flags of `torch.backends.cudnn`, even if `torch.backends.disable_global_flags()` has forbidden that.

    torch's own test tools call `disable_global_flags`.
    """
    torch._C._set_cudnn_allow_tf32(allow_tf32)
    torch._C._set_cudnn_deterministic(deterministic)
