"""The expressions of symbolic sizes in a graph, found by their values for two sets of sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule

from opgraph.runtime.providers.torch_internals import tree_leaves
from opgraph.torch.graph.aten import value_of
from opgraph.torch.graph.axis_splits import part_sizes
from opgraph.torch.graph.torch_internals import allows, python_text
from opgraph.torch.graph.views import elements_behind_views

_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
#: The types of symbolic sizes, and of numbers that follow from them.
SYMBOLIC: Any = tuple(_NUMBERS)
_NAME = "size_expression_"
#: The numbers of sets of sizes that are drawn: the fewest, even if enough are alike, and the most.
_FEW_DRAWS, _DRAWS = 40, 240


class NotSymbolicError(Exception):
    """A graph, or a program made of it, has a number that is no expression of the graph's symbols."""


class UnknownSizeError(Exception):
    """A size that depends on data: torch computes the values that have it."""


def number_of(value: Any, sizes: Mapping[Any, int]) -> Any:
    """A symbolic number, for these values of symbols.

    Raises:
        UnknownSizeError: it depends on other symbols, too.
    """
    found = value.node.expr.xreplace(sizes)
    if getattr(found, "free_symbols", ()):
        raise UnknownSizeError
    return _NUMBERS[type(value)](found)


class Expressions:
    """The expressions of a graph's symbols.

    Args:
        module: the graph.
        symbols: the symbols whose values a call provides, in order.
        samples: three sets of their values; the third distinguishes expressions that are equal for the first two by
            chance.

    Raises:
        NotSymbolicError: the samples do not distinguish two expressions.
    """

    def __init__(self, module: GraphModule, symbols: Sequence[Any], samples: Sequence[Sequence[int]]) -> None:
        self._symbols = symbols
        self._samples = samples
        self._names: dict[str, str] = {}  # text -> name
        self._known: dict[Any, str | None] = {}  # expression and type -> text
        #: Type and values -> text: 5 is not 5.0.
        self._found: dict[tuple[Any, ...], str] = {}
        #: Conditions that hold for the first two samples, mostly equations of texts that no sample distinguishes. They
        #: must hold for the sizes of a call.
        self._conditions: list[str] = []
        texts = list(dict.fromkeys(self._texts(module)))
        function = self._function(texts)
        known: dict[Any, str] = {}
        pairs: dict[Any, Any] = {}
        for text, *values in zip(texts, *(function(*sizes) for sizes in samples), strict=True):
            if pairs.setdefault(tuple(values[:2]), values[2]) != values[2]:
                raise NotSymbolicError
            is_fixed = values[0] == values[1]
            if not is_fixed:
                self._found.setdefault((type(values[0]), *values), text)
            other = repr(values[0]) if is_fixed else known.setdefault(tuple(values), text)
            if other != text and any(str(symbol) in text for symbol in symbols):
                self._conditions.append(f"({other}) == ({text})")
        for numbers in part_sizes(module):
            if any(isinstance(number, SYMBOLIC) for number in numbers):
                self._conditions += self._blocks([self._text_of(number) for number in numbers])
        for left in elements_behind_views(module):
            text = self._text_of(left)
            if text is not None and all(self._function([text])(*sizes)[0] >= 0 for sizes in samples[:2]):
                self._conditions.append(f"({text}) >= 0")

    def _blocks(self, texts: Sequence[str | None]) -> list[str]:
        """The conditions under which a part fills the block of an axis that it fills in both programs (`axis_splits`).

        The programs are made for the first two samples. The third may not fit: it shows nothing about the programs.

        Args:
            texts: of the sizes of the axis and of the part, and of the part's first place.
        """
        whole, part, first = texts
        if whole is None or part is None or first is None:
            return []
        blocks = set()
        for size, own, begin in (self._function([whole, part, first])(*sizes) for sizes in self._samples[:2]):
            if not own or size % own or begin % own:
                return []
            blocks.add((size // own, begin // own))
        conditions = [f"({whole}) == {count} * ({part}) and ({first}) == {place} * ({part})" for count, place in blocks]
        return conditions if len(blocks) == 1 else []

    def name(self, first: Any, second: Any) -> Any:
        """The replacement for two values of one number: the number if they are equal, else the name of an expression.

        Raises:
            NotSymbolicError: no expression of their type has these values.
        """
        if first == second:
            return first
        wanted = type(first), first, second
        return self._named(self._one_of(text for values, text in self._found.items() if values[:3] == wanted))

    def scalar(self, first: float, second: float) -> str:
        """The name of the expression, of any type, that has these two values, or whose reciprocal has them.

        Raises:
            NotSymbolicError: there is none, or more than one.
        """
        texts: dict[Any, str] = {}
        for (_, *values), text in self._found.items():
            if values[:2] != [first, second]:
                if not all(values) or [1 / value for value in values[:2]] != [first, second]:
                    continue
                values, text = [1 / value for value in values], f"1 / ({text})"
            other = texts.setdefault(tuple(values), text)
            if other != text:
                self._conditions.append(f"({other}) == ({text})")
        return self._named(self._one_of(texts.values()))

    def _one_of(self, texts: Iterable[str]) -> str:
        found = list(texts)
        if len(found) != 1:
            raise NotSymbolicError
        return found[0]

    def values(self) -> Callable[..., dict[str, Any]]:
        """The values of the names that were used so far, as a function of the symbols. It raises NotSymbolicError for
        sizes at which an expression has no value, or expressions differ that no sample distinguished, such as `s` and
        `min(s, 64)`."""
        function, names = self._function(list(self._names)), list(self._names.values())
        holds = self._function([" and ".join(self._conditions) or "True"])

        def values(*sizes: int) -> dict[str, Any]:
            try:
                if not all(holds(*sizes)):
                    raise NotSymbolicError
                return dict(zip(names, function(*sizes), strict=True))
            except (ArithmeticError, ValueError) as error:  # a reciprocal of 0
                raise NotSymbolicError from error

        return values

    def _named(self, text: str) -> str:
        return self._names.setdefault(text, f"{_NAME}{len(self._names)}")

    def _function(self, texts: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
        """The values of texts, as a function of the symbols."""
        source = f"lambda {', '.join(map(str, self._symbols))}: ({''.join(f'{text}, ' for text in texts)})"
        made: Callable[..., tuple[Any, ...]] = eval(source, {"math": math, "torch": torch})
        return made

    def _text(self, number: torch.SymInt | torch.SymFloat | torch.SymBool) -> str | None:
        """A number as an expression of Python; None if it depends on other symbols, whose values no call provides.

        Raises:
            NotSymbolicError: torch cannot print it, or its text has another value for a sample.
        """
        expression = number.node.expr
        if not expression.free_symbols <= set(self._symbols):
            return None
        text = python_text(expression)
        if text is None or not self._is_value(text, number):
            raise NotSymbolicError
        return text

    def _is_value(self, text: str, number: Any) -> bool:
        """True if a text has the value and the type of a number, for all samples."""
        try:
            function = self._function([text])
            wanted = [number_of(number, dict(zip(self._symbols, sizes, strict=True))) for sizes in self._samples]
            values = [function(*sizes)[0] for sizes in self._samples]
        except (ArithmeticError, NameError, SyntaxError, TypeError, ValueError):
            return False
        return all(type(a) is type(b) and math.isclose(a, b, rel_tol=1e-12) for a, b in zip(values, wanted))

    def _text_of(self, number: Any) -> str | None:
        """A number, symbolic or not, as `_text` gives it."""
        if not isinstance(number, SYMBOLIC):
            return str(number)
        key = number.node.expr, type(number)
        if key not in self._known:
            self._known[key] = self._text(number)
        return self._known[key]

    def _texts(self, module: GraphModule) -> Iterator[str]:
        """Sizes, strides, arguments, and the products of the sizes of adjacent axes."""
        text = self._text_of
        for node in module.graph.nodes:
            numbers: list[Any] = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, SYMBOLIC)]
            for value in tree_leaves(value_of(node)):
                if isinstance(value, SYMBOLIC):
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

    The same numbers of the graph are equal in all of them, and of the sets that were drawn these have the fewest equal
    numbers.

    Args:
        traced: the values that the graph was traced with; values near them are drawn.

    Raises:
        NotSymbolicError: none were found.
    """
    leaves = [v for n in module.graph.nodes for v in tree_leaves((n.args, n.kwargs, value_of(n)))]
    tensors = [v for v in leaves if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    numbers = [n for v in tensors for n in (*v.shape, *v.stride())]
    products = [math.prod(v.shape[begin:]) for v in tensors for begin in range(v.ndim)]
    sizes = {n.node.expr: n for n in (*numbers, *products) if isinstance(n, torch.SymInt)}
    others = {v.node.expr for v in leaves if isinstance(v, SYMBOLIC)} - sizes.keys()
    constants = {0, 1, *(n for n in numbers if isinstance(n, int))}
    #: Which numbers are equal -> for each set, a list of the symbols' values and the numbers.
    alike: dict[tuple[int, ...], list[list[int]]] = {}
    any_size = next(iter(sizes.values()), None)
    if any_size is None:
        raise NotSymbolicError

    @cache
    def may_be(symbol: Any, value: int) -> bool:
        return value > 1 and value not in constants and allows(any_size, {symbol: value})

    values = dict(zip(symbols, traced, strict=True))
    first_equal = _held_equal(any_size, values)
    free = [symbol for symbol in symbols if first_equal[symbol] == symbol]
    for attempt, chosen in enumerate(_near(free, [values[symbol] for symbol in free], may_be)):
        if attempt >= _FEW_DRAWS and any(len(found) >= count for found in alike.values()):
            break
        new = dict(zip(free, chosen, strict=True))
        known = {symbol: new[first_equal[symbol]] for symbol in symbols}
        drawn = [*known.values()]
        if len({*chosen}) < len(chosen) or not allows(any_size, known):
            continue
        try:
            filled = [expression.xreplace(known) for expression in (*sizes, *others)][: len(sizes)]
        except ArithmeticError:  # a division by 0
            continue
        own = [*drawn, *(int(e) for e in filled if not getattr(e, "free_symbols", ()))]
        if min(own) < 0:
            continue
        first = {number: -1 - number for number in constants}
        found = alike.setdefault(tuple(first.setdefault(n, at) for at, n in enumerate(own)), [])
        if all(a != b or a in constants for other in found for a, b in zip(own, other, strict=True)):
            found.append(own)
    enough = [found[:count] for found in alike.values() if len(found) >= count]
    if not enough:
        raise NotSymbolicError
    most = max(enough, key=lambda found: len({*found[0], *constants}))
    return [own[: len(symbols)] for own in most]


def _held_equal(any_size: torch.SymInt, traced: Mapping[Any, int]) -> dict[Any, Any]:
    """For each symbol the first one that guards force to be equal to it, by `a <= b` and `b <= a` for example; else
    itself.

    Values near the traced ones are tried. Guards may allow others that differ; those have a separate program.
    """
    steps = [step for reach in range(1, _TRIES) for step in (reach, -reach)]

    def may_differ(a: Any, b: Any) -> bool:
        near = [traced[a] + step for step in steps if traced[a] + step > 1]
        tried = ({one: other, two: traced[two]} for other in near for one, two in ((a, b), (b, a)))
        return any(allows(any_size, values) for values in tried)

    found: dict[Any, Any] = {}
    for symbol, value in traced.items():
        equal = (other for other, own in found.items() if own == other and traced[other] == value)
        found[symbol] = next((other for other in equal if not may_differ(symbol, other)), symbol)
    return found


#: The most values that are drawn for a symbol until it may have one of them.
_TRIES = 12


def _near(symbols: Sequence[Any], traced: Sequence[int], may_be: Callable[[Any, int], bool]) -> list[list[int]]:
    """Sets of sizes, those nearest to the traced ones first; some differ from these by multiples of larger numbers."""
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
