"""The source text of a library: spliced headers, one functor for each kernel, and tables for kernels/ort/call.h.

The text is a pure value, like every emitted text. It contains no names from a model: opgraph makes up the op names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from opgraph.codegen.kernel import KernelSource
from opgraph.codegen.sources import spliced
from opgraph.ir import dtypes
from opgraph.loops.loop import Loop
from opgraph.onnx.library import nvrtc
from opgraph.onnx.library.gpu import GpuKernel, gpu_kernels, kernels_text
from opgraph.onnx.library.ops import Form, LibraryOp, functor_of

#: kernels/ort/dense.h: the kind of a result, by `Store.per_row`.
_RESULTS = {"": "og::each_element", "kept": "og::each_row_kept", "dropped": "og::each_row_dropped"}

_ENTRY = """extern "C" __attribute__((visibility("default"))) og::ort::Status* RegisterCustomOps(
    og::ort::SessionOptions* options, const og::ort::ApiBase* base) {{
  {start}
  return og::ort::register_ops(options, base, ops, {count});
}}
"""


@dataclass(frozen=True, slots=True)
class LibraryText:
    """The source of a library.

    Attributes:
        code: C++.
        kernels: CUDA C++ of the GPU kernels, "" for none. `code` includes their machine code from `image_file`.
    """

    code: str
    kernels: str = ""


def image_file(architecture: str) -> str:
    """The file next to the source that holds the kernels for an architecture."""
    return f"kernels.{architecture}"


def library_text(ops: Sequence[LibraryOp]) -> LibraryText:
    """The whole source of a library of these ops. Each name and signature is there once for each provider."""
    unique = list(dict.fromkeys(ops))
    kernels: dict[str, str] = {}
    gpu: dict[str, KernelSource] = {}
    tables: list[str] = []
    rows: list[str] = []
    gpu_rows: list[str] = []
    for index, op in enumerate(unique):
        assert re.fullmatch(r"\w+", op.name), op.name
        forms = [
            _form_tables(f"op{index}_{i}", form, kernels, gpu if op.on_gpu else None) for i, form in enumerate(op.forms)
        ]
        tables += [table for table, _ in forms]
        entries = ", ".join(entry for _, entry in forms)
        tables.append(f"static const og::ort::Form op{index}_forms[] = {{{entries}}};")
        tables.append(f"static const int op{index}_in[] = {{{_types(op.inputs)}}};")
        tables.append(f"static const int op{index}_out[] = {{{_types(op.outputs)}}};")
        row = (
            f'"{op.name}", {op.least}, {len(op.inputs)}, {len(op.outputs)}, op{index}_in, op{index}_out, '
            f"{'true' if op.has_alpha else 'false'}, {len(op.forms)}, op{index}_forms}},"
        )
        rows.append(f"  {{{{}}, &og::ort::on_cpu, {row}")
        gpu_rows += [f"  {{{{}}, &og::ort::on_gpu, {row}"] if op.on_gpu else []
    skeletons = ["ort/rows.h"] if any(form.row_rank for op in unique for form in op.forms) else []
    skeletons += ["ort/gpu.h"] if gpu else []
    parts = [spliced(*(skeletons or ["ort/op.h"]))]
    parts += [f"namespace {name} {{\n{code}\n}}" for code, name in kernels.items()]
    parts += ["\n".join([*tables, "static og::ort::Op ops[] = {", *rows, *gpu_rows, "};"])]
    parts += [_images(list(gpu))] if gpu else []
    start = "og::ort::kernels = &gpu_kernels;" if gpu else ""
    parts += [_ENTRY.format(count=len(rows) + len(gpu_rows), start=start)]
    return LibraryText("\n\n".join(parts), kernels_text(list(gpu.values())) if gpu else "")


def _images(names: Sequence[str]) -> str:
    """The GPU kernels and their names. The assembler includes their machine code from files next to the source."""
    lines = []
    rows = []
    for architecture in (*nvrtc.CUBINS, nvrtc.PTX):
        label = f"og_image_{architecture}"
        name = image_file(architecture)
        lines.append(
            f'asm(".section .rodata\\n.balign 16\\n.globl {label}\\n.hidden {label}\\n{label}:\\n'
            f'.incbin \\"{name}\\"\\n.byte 0\\n.previous\\n");\n'
            f'extern "C" __attribute__((visibility("hidden"))) const og::u8 {label}[];'
        )
        number = architecture.partition("_")[2]
        rows.append(f"  {{{number[:-1]}, {number[-1]}, {_bool(architecture == nvrtc.PTX)}, {label}}},")
    listed = ", ".join(f'"{name}"' for name in names)
    return "\n".join(
        [
            *lines,
            "static const og::ort::Image gpu_images[] = {",
            *rows,
            "};",
            f"static const char* const gpu_names[] = {{{listed}}};",
            f"static og::cuda::Function* gpu_functions[og::ort::contexts * {len(names)}];",
            f"static const og::ort::Kernels gpu_kernels = {{{len(rows)}, gpu_images, {len(names)}, gpu_names, "
            "gpu_functions};",
        ]
    )


def _form_tables(
    name: str, form: Form, kernels: dict[str, str], gpu: dict[str, KernelSource] | None
) -> tuple[str, str]:
    """The tables of one form, and its entry in the table of forms.

    Args:
        kernels: names of functors by their text; extended in place.
        gpu: the GPU kernels by name, in order; extended in place. None: the form has none.
    """
    used = form.loop.reads()
    loads = ", ".join(
        f"{{{source}, {_bool(x.align == 'channel')}, {_bool(x.name in used)}}}"
        for x, source in zip(form.loop.loads, form.reads, strict=True)
    )
    variants, launch = [], "launch<{}>"
    if form.row_rank:
        launch = f"launch_inner<{{}}, {_bool(form.row_rank > 1)}>"
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
        f"{form.inputs}, {len(form.loop.loads)}, {name}_loads, {form.row_rank}, {name}_results, {len(variants)}, "
        f"{name}_variants, {moderate}"
    )
    if gpu is not None:
        rows = _gpu_rows(gpu_kernels(form), gpu)
        operands = [*(x.dtype for x in form.loop.loads), *(s.dtype for s in form.loop.stores)]
        sizes = ", ".join(str(dtypes.get(dtype).itemsize) for dtype in operands)
        lines.append(f"static const og::ort::GpuVariant {name}_gpu[] = {{{', '.join(rows)}}};")
        lines.append(f"static const og::u8 {name}_bytes[] = {{{sizes}}};")
        entry += f", {len(rows)}, {name}_gpu, {name}_bytes"
    return "\n".join(lines), f"{{{entry}}}"


def _gpu_rows(made: Sequence[GpuKernel], gpu: dict[str, KernelSource]) -> list[str]:
    """A form's GPU kernels as rows of og::ort::GpuVariant."""
    rows = []
    for kernel in made:
        gpu.setdefault(kernel.source.entry, kernel.source)
        place, v = list(gpu).index(kernel.source.entry), kernel.schedule
        rows.append(
            f'{{"{kernel.kinds}", {place}, {kernel.rank}, {v.vector}, {v.tile}, {kernel.most}, {_bool(v.narrow)}}}'
        )
    return rows


def _remarks(loop: Loop) -> list[str]:
    return [f"// {line}" for line in str(loop).splitlines()]


def _types(names: Sequence[str]) -> str:
    return ", ".join(str(int(dtypes.get(name).onnx)) for name in names)


def _bool(value: bool) -> str:
    return "true" if value else "false"
