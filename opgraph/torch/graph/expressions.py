"""The expressions of symbolic sizes that stand in a graph, found by their values for two sets of sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule

from opgraph.runtime.providers.torch_internals import tree_leaves
from opgraph.torch.graph.aten import value_of
from opgraph.torch.graph.torch_internals import allows, python_text

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_NAME = "size_expression_"
#: Sets of sizes that are drawn: until enough are alike, and at most.
_FEW_DRAWS, _DRAWS = 40, 240


class NotSymbolicError(Exception):
    """A graph, or what is made of it, has a number that no expression of its symbols gives."""


class Expressions:
    """The expressions of a graph's symbols.

    Args:
        module: the graph.
        symbols: those whose values a call gives, in order.
        samples: three sets of their values; the third tells apart what is equal for the first two by chance.

    Raises:
        NotSymbolicError: the samples do not tell two expressions apart.
    """

    def __init__(self, module: GraphModule, symbols: Sequence[Any], samples: Sequence[Sequence[int]]) -> None:
        self._symbols = symbols
        self._names: dict[str, str] = {}  # text -> name
        self._found: dict[tuple[Any, Any, Any], str] = {}
        #: Texts of equal values for all samples, which have to be equal for the sizes of a call.
        self._equal: list[str] = []
        texts = list(dict.fromkeys(self._texts(module)))
        function = self._function(texts)
        try:
            rows = zip(texts, *(function(*sizes) for sizes in samples), strict=True)
        except ArithmeticError as error:
            raise NotSymbolicError from error
        pairs: dict[Any, Any] = {}
        for text, *values in rows:
            known = str(values[0]) if values[0] == values[1] else self._found.setdefault(tuple(values), text)
            if pairs.setdefault(tuple(values[:2]), values[2]) != values[2]:
                raise NotSymbolicError
            if known != text and any(str(symbol) in text for symbol in symbols):
                self._equal.append(f"({known}) == ({text})")

    def name(self, first: Any, second: Any) -> Any:
        """What stands for the two values of one number: the number where they are equal, else an expression's name.

        Raises:
            NotSymbolicError: no expression has these values.
        """
        if first == second:
            return first
        return self._named(self._one_of(text for (a, b, _), text in self._found.items() if (a, b) == (first, second)))

    def scalar(self, first: np.ndarray, second: np.ndarray) -> str:
        """The name of the expression that these two values of a number are, or its reciprocal, rounded to their dtype.

        Raises:
            NotSymbolicError: there is none, or more than one.
        """

        def are(a: float, b: float) -> bool:
            pairs = ((a, first), (b, second))
            return all(bool(np.all(np.asarray(value).astype(own.dtype) == own)) for value, own in pairs)

        found = {values: text for values, text in self._found.items() if are(*values[:2])}
        for values, text in self._found.items():
            if all(values):
                reciprocal = f"1 / ({text})"
                a, b, c = (1 / value for value in values)
                if are(a, b) and found.setdefault((a, b, c), reciprocal) != reciprocal:
                    self._equal.append(f"({found[a, b, c]}) == ({reciprocal})")
        return self._named(self._one_of(found.values()))

    def _one_of(self, texts: Iterable[str]) -> str:
        found = list(texts)
        if len(found) != 1:
            raise NotSymbolicError
        return found[0]

    def values(self) -> Callable[..., dict[str, Any]]:
        """The values of the names that were given so far, as a function of the symbols. It raises NotSymbolicError for
        sizes where expressions differ that no sample told apart, such as `s` and `min(s, 64)`."""
        function, names = self._function(list(self._names)), list(self._names.values())
        holds = self._function([" and ".join(self._equal) or "True"])

        def values(*sizes: int) -> dict[str, Any]:
            if not all(holds(*sizes)):
                raise NotSymbolicError
            return dict(zip(names, function(*sizes), strict=True))

        return values

    def _named(self, text: str) -> str:
        return self._names.setdefault(text, f"{_NAME}{len(self._names)}")

    def _function(self, texts: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
        """The values of texts, as a function of the symbols."""
        source = f"lambda {', '.join(map(str, self._symbols))}: ({''.join(f'{text}, ' for text in texts)})"
        made: Callable[..., tuple[Any, ...]] = eval(source, {"math": math, "torch": torch})
        return made

    def _texts(self, module: GraphModule) -> Iterator[str]:
        """Sizes, strides, arguments, and the sizes of axes that lie beside each other, multiplied."""
        symbols, known = set(self._symbols), dict[Any, str | None]()

        def text(number: Any) -> str | None:
            if not isinstance(number, _SYMBOLIC):
                return str(number)
            expression = number.node.expr
            if expression not in known:
                known[expression] = python_text(expression) if expression.free_symbols <= symbols else None
            return known[expression]

        for node in module.graph.nodes:
            numbers: list[Any] = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, _SYMBOLIC)]
            for value in tree_leaves(value_of(node)):
                if isinstance(value, _SYMBOLIC):
                    numbers.append(value)
                elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    numbers += [*value.shape, *value.stride(), value.storage_offset()]
                    sizes = list(map(text, value.shape))
                    for begin, end in ((b, e) for b in range(len(sizes)) for e in range(b + 2, len(sizes) + 1)):
                        if None not in sizes[begin:end]:
                            yield " * ".join(f"({size})" for size in sizes[begin:end])
            yield from (found for number in numbers if (found := text(number)) is not None)


def sample_sizes(module: GraphModule, symbols: Sequence[Any], traced: Sequence[int], count: int) -> list[list[int]]:
    """Sets of values that a graph's symbols may have.

    In each the same numbers of the graph are equal, and of the sets that were drawn these have the fewest equal ones.

    Args:
        traced: the values that the graph was traced with; what is drawn is near them.

    Raises:
        NotSymbolicError: none were found.
    """
    values = [v for n in module.graph.nodes for v in tree_leaves(value_of(n)) if isinstance(v, torch.Tensor)]
    values = [v for v in values if v.layout is torch.strided]
    numbers = [n for v in values for n in (*v.shape, *v.stride())]
    products = [math.prod(v.shape[begin:]) for v in values for begin in range(v.ndim)]
    sizes = {n.node.expr: n for n in (*numbers, *products) if isinstance(n, torch.SymInt)}
    constants = {0, 1, *(n for n in numbers if isinstance(n, int))}
    #: By which of the numbers are equal: the symbols' values and the numbers, in one list for each set.
    alike: dict[tuple[int, ...], list[list[int]]] = {}
    any_size = next(iter(sizes.values()), None)

    @cache
    def may_be(symbol: Any, value: int) -> bool:
        return value > 1 and value not in constants and any_size is not None and allows(any_size, {symbol: value})

    for attempt, drawn in enumerate(_near(symbols, traced, may_be)):
        if attempt >= _FEW_DRAWS and any(len(found) >= count for found in alike.values()):
            break
        known = dict(zip(symbols, drawn, strict=True))
        if any_size is None or len({*drawn}) < len(drawn) or not allows(any_size, known):
            continue
        try:
            filled = [expression.xreplace(known) for expression in sizes]
        except ArithmeticError:  # a division by 0
            continue
        own = [*drawn, *(int(e) for e in filled if not getattr(e, "free_symbols", ()))]
        first = {number: -1 - number for number in constants}
        found = alike.setdefault(tuple(first.setdefault(n, at) for at, n in enumerate(own)), [])
        if all(a != b or a in constants for other in found for a, b in zip(own, other, strict=True)):
            found.append(own)
    enough = [found[:count] for found in alike.values() if len(found) >= count]
    if not enough:
        raise NotSymbolicError
    most = max(enough, key=lambda found: len({*found[0], *constants}))
    return [own[: len(symbols)] for own in most]


#: Values that are drawn for a symbol until it may have one of them.
_TRIES = 12


def _near(symbols: Sequence[Any], traced: Sequence[int], may_be: Callable[[Any, int], bool]) -> list[list[int]]:
    """Sets of sizes in the order of how near they are to one; multiples of larger numbers among them."""
    draw = random.Random(0)

    def near(symbol: Any, old: int, reach: int, step: int) -> int | None:
        tried = (old + step * draw.randint(-reach, reach) for _ in range(_TRIES))
        return next((value for value in tried if may_be(symbol, value)), None)

    drawn = [
        [near(symbol, old, reach, step) for symbol, old in zip(symbols, traced, strict=True)]
        for reach in range(1, _DRAWS // 8)
        for step in (1, 1, 1, 1, 2, 4, 8, 16)
    ]
    found = [[value for value in sizes if value is not None] for sizes in drawn]
    return sorted(
        (sizes for sizes in found if len(sizes) == len(symbols)),
        key=lambda sizes: sum(abs(new - old) / (old + 1) for new, old in zip(sizes, traced, strict=True)),
    )
