"""The source text of a library: spliced headers, one functor for each kernel, and tables for kernels/ort_call.h.

A pure value like every emitted text. No name of a model reaches it but the names of ops, which opgraph makes up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from opgraph.codegen.sources import spliced
from opgraph.ir import dtypes
from opgraph.loops.loop import Loop
from opgraph.onnx.library.ops import Form, LibraryOp, functor_of

#: kernels/ort_dense.h: what a result holds, by `Store.per_row`.
_RESULTS = {"": "og::each_element", "kept": "og::each_row_kept", "dropped": "og::each_row_dropped"}

_ENTRY = """extern "C" __attribute__((visibility("default"))) og::ort::Status* RegisterCustomOps(
    og::ort::SessionOptions* options, const og::ort::ApiBase* base) {{
  return og::ort::register_ops(options, base, ops, {count});
}}
"""


def library_text(ops: Sequence[LibraryOp]) -> str:
    """The whole source of a library of these ops, each name and signature once."""
    unique = list(dict.fromkeys(ops))
    kernels: dict[str, str] = {}
    tables: list[str] = []
    rows: list[str] = []
    for index, op in enumerate(unique):
        assert re.fullmatch(r"\w+", op.name), op.name
        forms = [_form_tables(f"op{index}_{i}", form, kernels) for i, form in enumerate(op.forms)]
        tables += [table for table, _ in forms]
        entries = ", ".join(entry for _, entry in forms)
        tables.append(f"static const og::ort::Form op{index}_forms[] = {{{entries}}};")
        tables.append(f"static const int op{index}_in[] = {{{_types(op.inputs)}}};")
        tables.append(f"static const int op{index}_out[] = {{{_types(op.outputs)}}};")
        rows.append(
            f'  {{{{}}, "{op.name}", {op.least}, {len(op.inputs)}, {len(op.outputs)}, op{index}_in, op{index}_out, '
            f"{'true' if op.has_alpha else 'false'}, {len(op.forms)}, op{index}_forms}},"
        )
    skeleton = "ort_rows.h" if any(form.row_rank for op in unique for form in op.forms) else "ort_op.h"
    parts = [spliced(skeleton), *(f"namespace {name} {{\n{code}\n}}" for code, name in kernels.items())]
    parts += ["\n".join(tables), "static og::ort::Op ops[] = {", "\n".join(rows), "};"]
    return "\n\n".join(parts[:-4]) + "\n\n" + "\n".join(parts[-4:]) + "\n\n" + _ENTRY.format(count=len(unique))


def _form_tables(name: str, form: Form, kernels: dict[str, str]) -> tuple[str, str]:
    """The tables of one form, and its entry in the table of forms."""
    used = form.loop.reads()
    loads = ", ".join(
        f"{{{source}, {_bool(x.align == 'channel')}, {_bool(x.name in used)}}}"
        for x, source in zip(form.loop.loads, form.reads, strict=True)
    )
    variants, launch = [], "launch<{}>"
    if form.row_rank:
        launch = f"launch_rows<{{}}, {_bool(form.row_rank > 1)}>"
    for kinds in form.kinds:
        code = functor_of(form, kinds)
        kernel = kernels.setdefault(code, f"kernel{len(kernels)}")
        variants.append(f'{{"{kinds}", og::{launch.format(f"{kernel}::Fused")}}}')
    lines = [
        *_remarks(form.loop),
        f"static const og::DenseLoad {name}_loads[] = {{{loads}}};",
        f"static const og::u8 {name}_results[] = {{{', '.join(_RESULTS[s.per_row] for s in form.loop.stores)}}};",
        f"static const og::ort::Variant {name}_variants[] = {{{', '.join(variants)}}};",
    ]
    moderate = "nullptr"
    if form.moderate:
        lines.append(f'static const og::ort::Variant {name}_moderate = {{"", og::launch<{form.moderate}>}};')
        moderate = f"&{name}_moderate"
    entry = (
        f"{{{form.inputs}, {len(form.loop.loads)}, {name}_loads, {form.row_rank}, {name}_results, {len(variants)}, "
        f"{name}_variants, {moderate}}}"
    )
    return "\n".join(lines), entry


def _remarks(loop: Loop) -> list[str]:
    return [f"// {line}" for line in str(loop).splitlines()]


def _types(names: Sequence[str]) -> str:
    return ", ".join(str(int(dtypes.get(name).onnx)) for name in names)


def _bool(value: bool) -> str:
    return "true" if value else "false"
