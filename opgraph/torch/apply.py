"""Where autograd calls a function that somebody wrote: a frame of Python's, which tells what is called with what."""

from __future__ import annotations

from types import CodeType

import torch

from opgraph.errors import Unimplemented


class UnsupportedTorchError(Unimplemented, ImportError):
    """This torch is newer than what opgraph.torch works with."""


def _code() -> CodeType:
    code = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
    if not isinstance(code, CodeType):
        raise UnsupportedTorchError(
            f"torch {torch.__version__} calls autograd.Functions from C, where opgraph.torch cannot follow yet",
            where="import opgraph.torch",
            fix="pip install 'torch>=2.11,<2.14'",
        )
    return code


#: What `torch.autograd.Function.apply` runs.
APPLY = _code()
