"""Generates the page of an op from its record: `specs/ops/<Kind>.md`, and the output of `opgraph ops KIND`.

`python -m opgraph.ops.page specs/ops` rewrites the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from opgraph.ir import dtypes
from opgraph.ir.opdef import Attr, Onnx, OpDef, Port, all_ops
from opgraph.ops import samples
from opgraph.ops.families import broadcast_rule
from opgraph.ops.onednn_differences import DIFFERENCES, UNSEEN

#: Points at which formulas break.
_POINTS = (-np.inf, -1.0, -0.0, 0.0, 1.0, np.inf, np.nan)


def page_text(record: OpDef) -> str:
    """The page of one op, in Markdown."""
    parts = [f"# {record.kind}", record.doc, *_signature(record)]
    if record.attrs:
        parts += ["## Attributes", _table(["name", "type", "default"], [_attr_row(a) for a in record.attrs])]
    parts += [*_shape(record), *_numbers(record), *_special_points(record), *_expression(record), *_onnx(record)]
    if record.source:
        parts += ["## Source", f"{record.source}."]
    return "\n\n".join(parts) + "\n"


def index_text() -> str:
    """The index of all pages, in Markdown."""
    rows = [[f"[{r.kind}]({r.kind}.md)", _first_sentence(r.doc).replace("|", "\\|")] for r in all_ops()]
    return (
        "\n\n".join(
            [
                "# The op set",
                "One page for each kind, written from its record in `opgraph/ops` by `python -m opgraph.ops.page "
                "specs/ops`. "
                "Kinds that oneDNN Graph has are called as there; the others have their ONNX name, or their name in C.",
                _table(["kind", "formula"], rows),
                "## Where schemas differ from oneDNN's",
                "Everything else is as oneDNN declares it: inputs, outputs, attributes, defaults, dtypes, constraints.",
                _table(["kinds", "difference", "why"], [d.row() for d in (*DIFFERENCES, *UNSEEN)]),
            ]
        )
        + "\n"
    )


def write_pages(folder: Path) -> list[Path]:
    """Writes every page and the index; removes pages of kinds that no longer exist. Returns the files, sorted."""
    texts = {f"{r.kind}.md": page_text(r) for r in all_ops()} | {"README.md": index_text()}
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(folder / name for name in texts)


def _signature(record: OpDef) -> Iterator[str]:
    yield "## Inputs and outputs"
    rows = [["in", *_port_row(p)] for p in record.inputs] + [["out", *_port_row(p)] for p in record.outputs]
    yield _table(["", "name", "dtype", ""], rows)
    listed = [f"{symbol}: {', '.join(f'`{d}`' for d in allowed)}" for symbol, allowed in record.types.items()]
    yield "\n".join(f"- {line}" for line in listed)
    if record.check is not None:
        yield _first_line(record.check.__doc__)
    if [p.name for p in record.inputs] == ["src_0", "src_1"]:
        yield "In the formula, a is `src_0` and b is `src_1`."
    if record.commutative:
        yield "The first two inputs may be swapped."


def _port_row(port: Port) -> list[str]:
    count = "optional" if port.optional else "any number" if port.variadic else ""
    return [f"`{port.name}`", port.type, ", ".join(filter(None, [count, "only its shape" if port.shape_only else ""]))]


def _attr_row(attr: Attr) -> list[str]:
    type_ = " or ".join(f"`{c}`" for c in attr.choices) if attr.choices else attr.type
    default = "required" if attr.required else "absent" if attr.default is None else f"`{_value(attr.default)}`"
    return [f"`{attr.name}`", type_, default]


def _value(value: object) -> str:
    if isinstance(value, tuple):
        alike = len(value) > 3 and len(set(value)) == 1
        return f"{len(value)} times {value[0]}" if alike else str(list(value))
    return str(value).lower() if isinstance(value, bool) else f"{value:.9g}" if isinstance(value, float) else str(value)


def _shape(record: OpDef) -> Iterator[str]:
    if record.family == "structural" or not (record.is_pointwise or record.infer.__doc__):
        return
    yield "## Shape"
    if record.infer is not broadcast_rule:
        yield _first_line(record.infer.__doc__)
    elif len(record.inputs) == 1:
        yield f"That of `{record.inputs[0].name}`."
    elif record.attr("auto_broadcast") is None:
        yield "The inputs broadcast together as in NumPy."
    else:
        yield 'The inputs broadcast together as in NumPy; they have one shape where auto_broadcast is "none".'


def _numbers(record: OpDef) -> Iterator[str]:
    if record.spelled is not None:
        yield "## Numbers"
        yield (
            "A library runs it; or, being spelled in smaller ops, it becomes part of a fused kernel with what comes "
            "before and after. Either way f16 and bf16 are rounded once, at the end."
        )
    if not record.is_pointwise:
        return
    yield "## Numbers"
    allowed = {d for port in record.outputs for d in record.types.get(port.type, (port.type,))}
    lines = []
    if record.is_cast:
        lines.append("It rounds where it stands, inside a fused run too.")
    elif allowed & {"f16", "bf16"}:
        lines.append(
            "f32, f16 and bf16 are computed in f32 and rounded once, when the result is stored; between two ops of a "
            'fused run nothing is rounded unless `rounding="each"` asks for it. f64 is computed in f64.'
        )
    read = [port for port in record.inputs if not port.shape_only]
    asked = {d for port in read for d in record.types.get(port.type, (port.type,))}
    if not allowed & set(dtypes.FLOATS) and asked & {"f16", "bf16"} and record.index_of is None:
        lines.append("An f16 or bf16 operand is asked about as its dtype holds it, inside a fused run too.")
    if allowed & set(dtypes.INTS) and not record.is_cast and record.index_of is None:
        lines.append("Integers are exact; what does not fit wraps modulo 2^width.")
    lines.append(f"About {record.cost} instruction{'s' if record.cost > 1 else ''} for each element.")
    yield " ".join(lines)


def _special_points(record: OpDef) -> Iterator[str]:
    floats_in = [p for p in record.inputs if "f64" in record.types.get(p.type, (p.type,))]
    one_input = sum(not p.optional for p in record.inputs) == 1
    if not record.is_pointwise or not floats_in or not one_input or record.is_cast or record.index_of:
        return
    assert record.reference is not None
    x = np.array(_POINTS)
    rows = []
    for ports, attrs in samples.forms(record, "f64"):
        if len(ports) == 1:
            label = ", ".join(f"{k}={_value(v)}" for k, v in attrs.items())
            rows.append([label, *[_point(v) for v in record.reference(x, **attrs)]])
    yield "Special points:"
    yield _table(["", *[f"x = {_point(v)}" for v in _POINTS]], rows)


def _point(value: float | np.generic) -> str:
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value)).lower()
    return "-0" if value == 0 and np.signbit(value) else f"{float(value):.6g}"


def _expression(record: OpDef) -> Iterator[str]:
    if record.expression is None:
        return
    found: dict[str, None] = {}
    for ports, attrs in samples.forms(record, samples.dtypes_of(record)[0]):
        template = record.expression if isinstance(record.expression, str) else record.expression(attrs, _names(ports))
        found.setdefault(template)
    yield "## C++"
    if record.is_cast:
        yield "`og::cast<To>({src})`, and at f16 and bf16 a rounding: `og::round_f16`, `og::round_bf16`."
    elif record.index_of:
        yield f"`{{src}}`, where the input is not the element but its index along `{record.index_of}`, an s32."
    else:
        yield _code(found)
    if record.by_position:
        yield "`{position}` is the row-major index of the element in the result, an s64."


def _onnx(record: OpDef) -> Iterator[str]:
    yield "## ONNX"
    if isinstance(record.onnx, str):
        yield f"{record.onnx[0].upper()}{record.onnx[1:]}."
    elif record.onnx:
        yield "\n".join(f"- {_form(form)}" for form in record.onnx)
    else:
        yield "No op of this meaning in ai.onnx: it is written as its decomposition."
    if record.decomposition is not None:
        found: dict[str, None] = {}
        for ports, attrs in samples.forms(record, samples.dtypes_of(record)[0]):
            template = record.decomposition
            found.setdefault(template if isinstance(template, str) else template(attrs, _names(ports)))
        yield "Decomposition (`$name` is an attribute):"
        yield _code(found)


def _form(form: Onnx) -> str:
    span = f"from opset {form.since}" if form.until is None else f"opsets {form.since} to {form.until}"
    parts = [f"`{form.op_type}`, {span}"]
    if form.inputs is not None:
        parts.append("inputs " + ", ".join(f"`{entry.replace('|', '` or `')}`" for entry in form.inputs))
    if form.attrs:
        parts.append("attributes " + ", ".join(a if a == b else f"{a} as {b}" for a, b in form.attrs.items()))
    parts += [f"{', '.join(ours)} joined as {theirs}" for theirs, ours in form.joined.items()]
    if form.fixed:
        parts.append("with " + ", ".join(f"{k}={_value(v)}" for k, v in form.fixed.items()))
    if form.scalars:
        parts.append(", ".join(f"`{name}`" for name in form.scalars) + " without dimensions")
    if form.dtypes is not None:
        parts.append("for " + ", ".join(f"`{d}`" for d in form.dtypes))
    if form.when:
        parts.append("where " + ", ".join(f"{k} is {_value(v)}" for k, v in form.when.items()))
    return "; ".join(parts) + (f". {form.note[0].upper()}{form.note[1:]}." if form.note else ".")


def _names(ports: Sequence[Port]) -> list[str]:
    return [p.name for p in ports]


def _code(lines: dict[str, None]) -> str:
    return "\n".join(["```", *lines, "```"])


def _first_line(text: str | None) -> str:
    return (text or "").split("\n")[0]


def _first_sentence(text: str) -> str:
    for end in (". ", "; "):
        text = text.split(end)[0]
    return text.rstrip(".") + "."


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    import opgraph.ops  # noqa: F401  # fills the registry

    for written in write_pages(Path(sys.argv[1])):
        print(written)
