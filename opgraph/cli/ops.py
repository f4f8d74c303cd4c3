"""`opgraph ops [KIND]`: the op set, or one op's page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from opgraph.cli.terminal import console, table
from opgraph.ir import opdef

if TYPE_CHECKING:
    from opgraph.ir.opdef import Attr, OpDef, Port


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("kind", metavar="KIND", nargs="?", help="print this op's page")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    import opgraph.ops  # noqa: F401  # fills the registry

    if args.kind:
        from opgraph.ops.page import page_text

        print(page_text(opdef.get(args.kind, where="opgraph ops")))
        return 0
    rows = [
        (
            record.kind,
            ", ".join(_port(p) for p in record.inputs),
            ", ".join(_attr(a) for a in record.attrs),
            _dtypes(record),
            _onnx(record),
        )
        for record in opdef.all_ops()
    ]
    columns = ("kind", "~inputs", "~attributes", "~dtypes", "~ONNX")
    console().print(table(f"{len(rows)} kinds", columns, rows))
    return 0


def _port(port: Port) -> str:
    return port.name + ("..." if port.variadic else "?" if port.optional else "")


def _attr(attr: Attr) -> str:
    value = "" if attr.optional else " required" if attr.default is None else f"={attr.default}"
    return attr.name + value


def _dtypes(record: OpDef) -> str:
    """The dtypes of a record's first type symbol, as one word if there is one."""
    names = next(iter(record.types.values()), ())
    short = {frozenset(opdef_types): word for word, opdef_types in _WORDS.items()}
    return short.get(frozenset(names)) or (", ".join(names) if len(names) < 6 else f"{len(names)} dtypes")


def _words() -> dict[str, tuple[str, ...]]:
    from opgraph.ir import dtypes

    numeric = (*dtypes.FLOATS, *dtypes.INTS)
    return {
        "floats": dtypes.FLOATS,
        "integers": dtypes.INTS,
        "floats, integers": numeric,
        "floats, signed integers": tuple(n for n in numeric if n != "u8"),
        "all": dtypes.ARITHMETIC,
        "any": (*dtypes.BY_NAME, dtypes.UNDEF),
    }


_WORDS = _words()


def _onnx(record: OpDef) -> str:
    if isinstance(record.onnx, str):
        return "-"
    forms = {f"{form.op_type}-{form.since}": None for form in record.onnx}
    return ", ".join(forms) or "composed"
