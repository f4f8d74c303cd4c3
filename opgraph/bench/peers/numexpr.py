"""numexpr: the formula as one expression, in blocks that fit the cache, on the threads of the case."""

from __future__ import annotations

import re

import numpy as np

from opgraph.bench.case import Case
from opgraph.bench.peers import text
from opgraph.bench.peers.peer import Absent, Built, Peer, Refused, forward_only

_NUMBER = re.compile(r"#([^#]*)#")


def _find(device: str) -> str:
    try:
        import numexpr
    except ImportError as error:
        raise Absent(str(error)) from None
    return str(numexpr.__version__)


def _build(case: Case) -> Built:
    import numexpr

    forward_only(case)
    if case.dtype != "f32":
        raise Refused(f"has no {case.dtype}")
    numexpr.set_num_threads(case.threads)
    expression, numbers = _numbers_apart(text.expression(case.entry, text.NUMEXPR, "#{!r}#"))
    arrays = {o.name: a for o, a in zip(case.entry.operands, case.inputs)} | numbers
    run = numexpr.NumExpr(expression, [(name, numexpr.necompiler.getType(a)) for name, a in arrays.items()])
    given, out = tuple(arrays.values()), case.out
    return Built(call=lambda: run(*given, out=out, order="K", casting="safe", ex_uses_vml=False))


def _numbers_apart(expression: str) -> tuple[str, dict[str, np.ndarray]]:
    """Numbers as inputs of the arrays' dtype; in the text, they would make numexpr compute in float64."""
    found = {"one": np.array(1.0, np.float32)} if "one" in expression else {}
    names: dict[str, str] = {}
    for number in _NUMBER.findall(expression):
        if number not in names:
            names[number] = f"c{len(names)}"
            found[names[number]] = np.array(float(number), np.float32)
    return _NUMBER.sub(lambda m: names[m.group(1)], expression), found


PEER = Peer(name="numexpr", get="pip install numexpr", devices=("cpu",), find=_find, build=_build)
