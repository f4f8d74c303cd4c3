"""Whether Python code compares the class of a tensor: what stands for one while it is fused is of another class.

`isinstance` is answered as for the tensor itself; `type(x) is torch.Tensor` cannot be.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

_CLASSES = frozenset(("Tensor", "Parameter"))


def compares_classes(fn: Callable[..., Any], owner: type = object) -> bool:
    """Whether a function, or one of the same file that it calls, asks for `type(...)` and names a class of tensors.

    Args:
        owner: the class in which its methods are found.
    """
    fn = getattr(fn, "__func__", fn)
    return isinstance(fn, FunctionType) and _compares(fn, owner)


@lru_cache(maxsize=4096)
def _compares(fn: FunctionType, owner: type) -> bool:
    waiting, seen = [fn], {fn}
    while waiting:
        current = waiting.pop()
        for code in _codes_in(current.__code__):
            if _is_comparison(code):
                return True
            for name in code.co_names:
                found = getattr(owner, name, current.__globals__.get(name))
                if isinstance(found, FunctionType) and found not in seen and found.__module__ == fn.__module__:
                    seen.add(found)
                    waiting.append(found)
    return False


def _is_comparison(code: CodeType) -> bool:
    if "type" not in code.co_names or not _CLASSES.intersection(code.co_names):
        return False
    return any(i.opname == "LOAD_GLOBAL" and i.argval == "type" for i in dis.get_instructions(code))


def _codes_in(code: CodeType) -> list[CodeType]:
    found = [code]
    for current in found:
        found += [c for c in current.co_consts if isinstance(c, CodeType)]
    return found
