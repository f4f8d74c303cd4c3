"""Labels and tooltips for the parts of a diagram: short, printable, with one meaning each."""

from __future__ import annotations

from collections import Counter

from opgraph.cli.terminal import printable
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.ir.op import Op
from opgraph.partition.partition import LIBRARY, Partition

#: Characters of a tensor's name that are shown.
NAME_WIDTH = 28
_CHAR, _SMALL_CHAR = 7.3, 5.5  # advance of one character of the two monospaced sizes


def header(part: Partition) -> str:
    """The text above a box, for example: 3 fused · swish."""
    runs = part.provider if part.kind == LIBRARY else ""
    counts = Counter(part.units)
    units = ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())
    return printable(" · ".join(text for text in (f"{part.id} {part.kind}", runs, units) if text), 60)


def about(part: Partition) -> str:
    """A partition in four lines."""
    reads = ", ".join(type_text(t) for t in part.input_ports[:8])
    writes = ", ".join(type_text(t) for t in part.output_ports[:8])
    return f"{header(part)}\n{len(part.ops)} ops\nreads {reads}\nwrites {writes}"


def about_op(op: Op) -> str:
    """An op with its types and attributes."""
    ins = ", ".join(type_text(t) for t in op.inputs)
    outs = ", ".join(type_text(t) for t in op.outputs)
    attrs = [f"{k} = {printable(str(v), 80)}" for k, v in op.attrs.items() if not k.startswith("onnx_")]
    return "\n".join([printable(op.label, 500), f"({ins}) -> ({outs})", *attrs])


def about_tensor(tensor: LogicalTensor) -> str:
    """A name and a type."""
    return f"{printable(tensor.name or str(tensor.id), 500)}: {type_text(tensor)}"


def name_text(tensor: LogicalTensor) -> str:
    """A tensor's name, shortened."""
    return printable(tensor.name or str(tensor.id), NAME_WIDTH)


def type_text(tensor: LogicalTensor) -> str:
    """A tensor's dtype and dimensions, shortened."""
    return printable(tensor.type_text, 36)


def text_width(text: str) -> float:
    """The width of a title."""
    return len(text) * _CHAR


def small_width(text: str) -> float:
    """The width of small print."""
    return len(text) * _SMALL_CHAR


def subtitle_of(op: Op) -> str:
    """The text below an op's kind: its constant numbers, else its name."""
    numbers = [t.data.item() for t in op.inputs if t.data is not None and t.data.size == 1]
    if numbers:
        return "with " + ", ".join(f"{n:.6g}" if isinstance(n, float) else str(n) for n in numbers)
    return "" if op.name == f"{op.kind}_{op.id}" else op.name
