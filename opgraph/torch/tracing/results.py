"""What a traced function returns: tensors, or tuples, lists and dicts of them, computed or passed through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgraph.errors import InvalidArguments
from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.proxy import Proxy, Ref
from opgraph.torch.tracing.session import Session


@dataclass(frozen=True, slots=True)
class Output:
    """In a result: the output of the graph with this index."""

    index: int


@dataclass(frozen=True, slots=True)
class Kept:
    """In a result: something that the function returned as it was, the `index`-th such thing of a run."""

    index: int


def structure_of(session: Session, result: Any, outputs: dict[Ref, int], kept: list[Any]) -> Any:
    """A function's result with Output and Kept in place of what is in it; fills `outputs` and `kept`.

    Raises:
        InvalidArguments: traced values in something that is no tuple, list or dict.
    """
    if type(result) is Proxy:
        if result.session is not session:
            raise trace_errors.leaked()
        if result.actual is None:
            return Output(outputs.setdefault(result.ref, len(outputs)))
        result = result.actual
    elif isinstance(result, dict) and type(result) is dict:
        return {k: structure_of(session, v, outputs, kept) for k, v in result.items()}
    elif type(result) in (list, tuple):
        return type(result)(structure_of(session, v, outputs, kept) for v in result)
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(structure_of(session, v, outputs, kept) for v in result))
    elif isinstance(result, (set, frozenset)) or hasattr(result, "__dict__"):
        _refuse_inside(result)
    kept.append(result)
    return Kept(len(kept) - 1)


def _refuse_inside(result: Any) -> None:
    values = result if isinstance(result, (set, frozenset)) else getattr(result, "__dict__", {}).values()
    if not isinstance(result, torch.Tensor) and any(type(v) is Proxy for v in values):
        raise InvalidArguments(
            f"a fused function returns its tensors in a {type(result).__name__}",
            where="the result of a fused function",
            fix="return a tensor, or a tuple, list or dict of tensors",
        )


def hashable(structure: Any) -> Any:
    """A structure as a key."""
    if isinstance(structure, dict):
        return (dict, *[(k, hashable(v)) for k, v in structure.items()])
    if isinstance(structure, (list, tuple)):
        return (type(structure), *map(hashable, structure))
    return structure


def filled(structure: Any, results: Sequence[Any], kept: Sequence[Any]) -> Any:
    """The result that a structure stands for."""
    if type(structure) is Output:
        return results[structure.index]
    if type(structure) is Kept:
        return kept[structure.index]
    if type(structure) is dict:
        return {k: filled(v, results, kept) for k, v in structure.items()}
    parts = [filled(v, results, kept) for v in structure]
    return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
