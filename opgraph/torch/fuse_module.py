"""`fuse` for modules: the module's own Python runs, and its pointwise arithmetic in fused kernels.

Only the instance's `forward` is wrapped: class, parameters, buffers and state_dict keys stay, and `unfuse` takes the
wrapper off. Hooks, parametrizations, train() and eval(), deepcopy and pickle work as before. Under activation
checkpointing, modules inside of the region are fused, plain functions are not. torch.jit.script wants it unfused.

One thing may be refused that eager torch takes: a fused op may keep its result for backward where eager keeps a mask,
or an input where eager keeps neither. Who then writes into that tensor through a view gets autograd's error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from opgraph.errors import InvalidArguments
from opgraph.loops.lower import ROUNDINGS
from opgraph.torch.classes import compares_classes
from opgraph.torch.fold import called_for_onnx
from opgraph.torch.lazy.mode import current, plain_forward, run_lazily, unseen

#: The code in nn.Module that calls `forward`.
_CALLERS = {
    nn.Module._slow_forward.__code__,
    nn.Module._call_impl.__code__,
    *(c for c in nn.Module._call_impl.__code__.co_consts if isinstance(c, CodeType)),
}


#: Modules that have another way through in eval mode, which they do not take where anybody looks on.
_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _may_be_fast(module: nn.Module) -> bool:
    if module.training or not isinstance(module, _FAST):
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


class FusedForward:
    """A module's `forward`, with pointwise arithmetic that waits until its values are needed.

    Args:
        module: whose forward.
        instead: what stood in the instance's place before, if anything (a forward that another library put there).
        rounding: as `fuse` takes it.
    """

    def __init__(self, module: nn.Module, instead: Callable[..., Any] | None = None, rounding: str = "store") -> None:
        self.module = module
        self.instead = instead
        self.rounding = rounding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns."""
        if plain_forward():
            return called_for_onnx(self.original, args, kwargs)
        session, module = current(), self._called(sys._getframe(1))
        if compares_classes(type(module).forward, type(module)) or _may_be_fast(module):
            with nullcontext() if session is None else unseen(session):
                return self._original_of(module, args, kwargs)
        if session is None:
            return run_lazily(lambda: self._original_of(module, args, kwargs), rounding=self.rounding)
        result = self._original_of(module, args, kwargs)
        if module._forward_hooks:
            session.compute_all()  # a hook may let go of parameters (sharded training does) or look at anything
        return result

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward as it was."""
        return self._original_of(self.module, args, kwargs)

    def _original_of(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.instead is not None:
            return self.instead(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _called(self, caller: FrameType) -> nn.Module:
        """The module that is called: a shallow copy (`copy.copy`, a replica of DataParallel) has this same object in
        its __dict__, and parameters of its own, and only the frame of Module.__call__ knows it."""
        found = caller.f_locals.get("self") if caller.f_code in _CALLERS else None
        is_copy = isinstance(found, nn.Module) and found.__dict__.get("forward") is self
        return found if is_copy and found is not None else self.module

    @property
    def __wrapped__(self) -> Any:
        """The forward as it was, for those who ask for its signature."""
        return self.instead if self.instead is not None else type(self.module).forward.__get__(self.module)

    @property
    def __code__(self) -> Any:
        """As above: torch.export reads the names of arguments from it."""
        return getattr(self.__wrapped__, "__code__", None)

    def __repr__(self) -> str:
        return f"<fused forward of {type(self.module).__name__}>"


def fuse_module(model: nn.Module, rounding: str = "store") -> nn.Module:
    """Wraps the forward of the module and of all that it is made of; does nothing to what is fused already.

    Raises:
        InvalidArguments: the rounding is none that there is; nothing is wrapped then.
    """
    check_rounding(rounding)
    for module in model.modules():
        if module is not model and (
            type(module).__module__.startswith("torch.nn.modules") and not any(module.children())
        ):
            continue  # one library call, or one activation: the module around it sees it
        forward = module.__dict__.get("forward")
        if not isinstance(forward, FusedForward):
            module.__dict__["forward"] = FusedForward(module, forward, rounding)
    return model


def check_rounding(rounding: str) -> None:
    """Raises InvalidArguments where there is no such rounding."""
    if rounding not in ROUNDINGS:
        raise InvalidArguments(f"unknown rounding {rounding!r}", where="fuse", fix=f"use one of {', '.join(ROUNDINGS)}")


def unfuse(model: nn.Module) -> nn.Module:
    """Undoes `fuse` for the module and all that it is made of.

    Raises:
        InvalidArguments: this is no module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArguments(
            f"an object of type {type(model).__name__} is no module", where="unfuse",
            fix="of a fused function, `fn.__wrapped__` is what it was written as",
        )  # fmt: skip
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, FusedForward):
            if forward.instead is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward.instead
    return model
