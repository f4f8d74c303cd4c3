"""The text form of a loop: printing and parsing."""

from __future__ import annotations

import json
import re

from opgraph.errors import ModelError
from opgraph.ir.op import AttrValue
from opgraph.loops.loop import Arg, Axes, Cut, Load, Loop, Statement, Store
from opgraph.loops.verify import verify_loop

_LOAD = re.compile(
    r"(?P<name>x\d+) = load (?P<dtype>\w+)(?: align=(?P<align>\w+))?(?: axis=(?P<axis>-?\d+))?"
    r"(?: cut=\[(?P<cut>[^]]*)\])?$"
)
_STATEMENT = re.compile(
    r"(?P<result>t\d+): (?P<dtype>\w+) = (?P<kind>\w+)\((?P<args>.*)\)(?P<rounds> rounded)?  # (?P<tag>\d+)$"
)
_STORE = re.compile(
    r"store (?P<dtype>\w+) (?P<value>\w+)"
    r"(?: summed to (?P<to>\(\)|x\d+(?:, x\d+)*)|(?P<row> per row)(?P<dropped> dropped)?)?(?: cut=\[(?P<cut>[^]]*)\])?$"
)
_ITEM = re.compile(r'\s*(?:(?P<key>\w+)=)?(?P<value>"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^,]+?)\s*(?:,|$)')


def loop_text(loop: Loop) -> str:
    """The text form; see `opgraph.loops.loop` for an example."""
    lines = [f"loop({', '.join(f'{a.kind} {a.which}' for a in loop.axes)})"]
    for load in loop.loads:
        align = "" if load.align == "right" else f" align={load.align}"
        axis = f" axis={load.axis}" if load.align == "index" else ""
        lines.append(f"  {load.name} = load {load.dtype}{align}{axis}{_cut_text(load.cut)}")
    for s in loop.statements:
        args = [a if isinstance(a, str) else _value_text(a) for a in s.args] + [
            f"{k}={_value_text(v)}" for k, v in s.attrs
        ]
        rounds = " rounded" if s.rounds else ""
        lines.append(f"  {s.result}: {s.dtype} = {s.kind}({', '.join(args)}){rounds}  # {s.tag}")
    for store in loop.stores:
        summed = "" if store.to is None else f" summed to {', '.join(store.to) or '()'}"
        per_row = {"": "", "kept": " per row", "dropped": " per row dropped"}[store.per_row]
        lines.append(f"  store {store.dtype} {store.value}{summed}{per_row}{_cut_text(store.cut)}")
    return "\n".join(lines)


def parse_loop(text: str) -> Loop:
    """Parses a loop that was printed.

    Raises:
        ModelError: a line is not a line of a loop.
    """
    head, *body = [line.strip() for line in text.strip().splitlines()]
    axes = re.fullmatch(r"loop\((?P<axes>.*)\)", head)
    if axes is None:
        raise _unreadable(head)
    groups = tuple(Axes(kind=k, which=w) for k, w in (part.split() for part in axes["axes"].split(", ")))
    rows = Loop(axes=groups, loads=(), statements=(), stores=()).row_axes
    loads: list[Load] = []
    statements: list[Statement] = []
    stores: list[Store] = []
    for line in body:
        if m := _LOAD.match(line):
            align = m["align"] or "right"
            own = rows if align == "rows" else ()
            loads.append(
                Load(
                    name=m["name"],
                    dtype=m["dtype"],
                    align=align,
                    axis=int(m["axis"] or 0),
                    rows=own,
                    cut=_cut(m["cut"]),
                )
            )
        elif m := _STATEMENT.match(line):
            args, attrs = _items(m["args"])
            statements.append(
                Statement(
                    result=m["result"],
                    dtype=m["dtype"],
                    kind=m["kind"],
                    args=args,
                    attrs=attrs,
                    rounds=bool(m["rounds"]),
                    tag=int(m["tag"]),
                )
            )
        elif m := _STORE.match(line):
            to = None if m["to"] is None else tuple(re.findall(r"x\d+", m["to"]))
            per_row = "" if not m["row"] else "dropped" if m["dropped"] else "kept"
            stores.append(Store(value=m["value"], dtype=m["dtype"], to=to, per_row=per_row, cut=_cut(m["cut"])))
        else:
            raise _unreadable(line)
    return verify_loop(Loop(axes=groups, loads=tuple(loads), statements=tuple(statements), stores=tuple(stores)))


def _cut_text(cut: Cut) -> str:
    return f" cut=[{' '.join('x'.join(str(d or '*') for d in part) or '-' for part in cut)}]" if cut else ""


def _cut(text: str | None) -> Cut:
    return tuple(
        () if part == "-" else tuple(0 if d == "*" else int(d) for d in part.split("x"))
        for part in (text or "").split()
    )


def _items(text: str) -> tuple[tuple[Arg, ...], tuple[tuple[str, AttrValue], ...]]:
    args: list[Arg] = []
    attrs: list[tuple[str, AttrValue]] = []
    for m in _ITEM.finditer(text):
        word = m["value"]
        if m["key"]:
            attrs.append((m["key"], _value(word)))
        else:
            args.append(word if re.fullmatch(r"[xt]\d+", word) else _value(word))  # type: ignore[arg-type]
    return tuple(args), tuple(attrs)


def _value_text(value: AttrValue) -> str:
    if isinstance(value, tuple):
        return f"[{' '.join(_value_text(v) for v in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _value(word: str) -> AttrValue:
    if word.startswith("["):
        return tuple(_value(w) for w in word[1:-1].split())  # type: ignore[return-value]
    if word in ("true", "false"):
        return word == "true"
    if word.startswith('"'):
        return str(json.loads(word))
    try:
        return int(word) if re.fullmatch(r"-?\d+", word) else float(word)
    except ValueError:
        raise _unreadable(word) from None


def _unreadable(line: str) -> ModelError:
    return ModelError(
        f"cannot read {line!r}", where="the text of a loop", fix="print a loop with str(loop) to see the form"
    )
