"""Allowed and forbidden names in functions whose reads can be known: torch's and Python's own, numbers, strings."""

from __future__ import annotations

import builtins
import math
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from opgraph.runtime.providers.torch_internals import OpOverload, OpOverloadPacket

#: Instructions that change something outside, or have effects that names do not show. Exception handlers are included:
#: there, missing names matter as well.
FORBIDDEN = frozenset(
    (
        "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE",
        "IMPORT_NAME", "IMPORT_FROM", "YIELD_VALUE", "RETURN_GENERATOR", "LOAD_BUILD_CLASS", "LOAD_SUPER_ATTR",
        "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF", "BEFORE_WITH", "LOAD_SPECIAL",
        "PUSH_EXC_INFO", "MATCH_CLASS",
    )
)  # fmt: skip
BUILTINS = frozenset(
    getattr(builtins, name)
    for name in (
        "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max",
        "min", "pow", "range", "reversed", "round", "slice", "sorted", "str", "sum", "tuple", "zip", "ValueError",
        "TypeError", "RuntimeError", "AssertionError", "NotImplementedError",
    )
)  # fmt: skip
#: Names that read or change torch's own state, or that reach tensors without their names.
STATE = frozenset(
    (
        "backends", "compiler", "distributed", "random", "initial_seed", "cuda", "jit", "_C", "overrides", "no_grad",
        "enable_grad", "inference_mode", "autocast", "amp", "autograd", "utils", "is_compiling", "is_scripting",
        "is_tracing", "parameters", "named_parameters", "buffers", "named_buffers", "modules",
        "named_modules", "children", "named_children", "state_dict", "__dict__", "__class__",
        "__getattribute__", "get_parameter", "get_buffer", "get_submodule", "_parameters", "_buffers",
        "_modules", "manual_seed", "seed", "use_deterministic_algorithms", "_dynamo", "_inductor",
    )
)  # fmt: skip
#: Methods that change a list or a dict.
CHANGING = frozenset(
    (
        "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update",
        "__setitem__", "__delitem__", "__iadd__", "__imul__", "__ior__",
    )
)  # fmt: skip
#: Methods that arithmetic never calls.
HARMLESS = frozenset(
    (
        "__init__", "__new__", "__init_subclass__", "__post_init__", "__repr__", "__str__", "__dir__", "__del__",
        "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__replace__",
    )
)  # fmt: skip
#: Classes whose operators have no effects except those that names show.
PLAIN_CLASSES = (object, torch.nn.Module, torch.nn.Sequential)
#: Hooks of all modules, by their names in a plan.
GLOBAL_HOOKS: dict[str, Any] = {
    name: getattr(torch.nn.modules.module, name)
    for name in (
        "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
    )
}  # fmt: skip
#: Types of immutable values, which are compared directly.
PRIMITIVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))


def tells_state(name: str) -> bool:
    """True if an attribute of this name may read or change torch's own state, or a module's."""
    if name.startswith(("is_", "are_", "get_", "set_")) and name != "is_tensor":
        return name.startswith("set_") or (hasattr(torch, name) and not hasattr(torch.Tensor, name))
    return name in STATE


def reads_state(value: Any) -> bool:
    """True if an object of torch, found under any name, may read or change torch's own state."""
    name = str(getattr(value, "__name__", ""))
    if isinstance(value, (ModuleType, FunctionType)):
        home = name if isinstance(value, ModuleType) else str(value.__globals__.get("__name__"))
        if not STATE.isdisjoint(home.split(".")):
            return True
    return not isinstance(value, (ModuleType, type)) and tells_state(name)


def is_constant(value: Any) -> bool:
    """True for a number, a string or a similar value, or a tuple of these."""
    return type(value) in PRIMITIVES or (type(value) is tuple and all(map(is_constant, value)))


def is_trusted(value: Any) -> bool:
    """True for objects of torch, math or Python itself, which do the same at every call."""
    if isinstance(value, ModuleType):
        return value is math or value.__name__.split(".")[0] == "torch"
    if isinstance(value, FunctionType):
        # functools.wraps may have replaced its own name. Wrappers made by torch's decorators call a user's function.
        return not value.__closure__ and str(value.__globals__.get("__name__")).split(".")[0] == "torch"
    if not isinstance(value, _OF_C):
        return False
    home = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None) or ""
    return value in BUILTINS or home == "math" or home.split(".")[0] == "torch" or _is_torch_builtin(value)


def _is_torch_builtin(value: Any) -> bool:
    return isinstance(value, BuiltinFunctionType) and getattr(torch, value.__name__, None) is value


_OF_C = (
    type, BuiltinFunctionType, MethodDescriptorType, GetSetDescriptorType, WrapperDescriptorType,
    OpOverload, OpOverloadPacket,
)  # fmt: skip
