"""Whether Python code compares the class of a tensor: what stands for one while it is fused is of another class.

`isinstance` is answered as for the tensor itself; `type(x) is torch.Tensor` and `isinstance(x, torch.FloatTensor)`
cannot be.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

#: What asks, and what is asked for.
_QUESTIONS = {
    "type": frozenset(("Tensor", "Parameter")),
    "isinstance": frozenset(
        f"{kind}Tensor"
        for kind in ("Float", "Double", "Half", "BFloat16", "Bool", "Byte", "Char", "Short", "Int", "Long")
    ),
}


def compares_classes(fn: Callable[..., Any]) -> bool:
    """Whether a function, or one of the same file that it calls, asks for `type(...)` and names a class of tensors."""
    fn = getattr(fn, "__func__", fn)
    return isinstance(fn, FunctionType) and _compares(fn)


@lru_cache(maxsize=4096)
def _compares(fn: FunctionType) -> bool:
    waiting, seen = [fn], {fn}
    while waiting:
        current = waiting.pop()
        for code in _codes_in(current.__code__):
            if _is_comparison(code):
                return True
            called = [current.__globals__.get(name) for name in code.co_names]
            for found in (*called, getattr(current, "__wrapped__", None)):
                if isinstance(found, FunctionType) and found not in seen and found.__module__ == fn.__module__:
                    seen.add(found)
                    waiting.append(found)
    return False


def _is_comparison(code: CodeType) -> bool:
    asked = [
        name for name, classes in _QUESTIONS.items() if name in code.co_names and classes.intersection(code.co_names)
    ]
    return bool(asked) and any(i.opname == "LOAD_GLOBAL" and i.argval in asked for i in dis.get_instructions(code))


def _codes_in(code: CodeType) -> list[CodeType]:
    found = [code]
    for current in found:
        found += [c for c in current.co_consts if isinstance(c, CodeType)]
    return found
