"""Readable compiler errors of kernels: the log, the source lines that it names, and the ops of these lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opgraph.codegen.kernel import KernelSource

_MAX_LOG_LINES, _MAX_SOURCE_LINES = 20, 12


def told(log: str, source: KernelSource, labels: Sequence[str], file: str) -> str:
    """Returns the beginning of a log, followed by the numbered source lines that it names, each with its op.

    Args:
        labels: label of each op, by tag.
        file: the name of the source file in the log.
    """
    lines = [f"    {line}" for line in log.strip().splitlines()[:_MAX_LOG_LINES]]
    code = source.code.splitlines()
    named = [n for n in _named(log, file) if n <= len(code)]
    if named:
        lines.append("  the lines that it speaks of:")
    for number in named[:_MAX_SOURCE_LINES]:
        op = _label(source, labels, number)
        lines.append(f"    {number:>5}  {code[number - 1].strip()}" + (f"    <- {op}" if op else ""))
    return "\n".join(lines)


def ops_of(log: str, source: KernelSource, labels: Sequence[str], file: str) -> str:
    """The ops of the source lines that a log names; "" if there are none."""
    found = [_label(source, labels, number) for number in _named(log, file)]
    return ", ".join(dict.fromkeys(label for label in found if label))


def _named(log: str, file: str) -> list[int]:
    """The line numbers in a log, each once, in ascending order."""
    return sorted({int(n) for n in re.findall(rf"{re.escape(file)}[:(](\d{{1,9}})", log)})


def _label(source: KernelSource, labels: Sequence[str], number: int) -> str:
    tag = source.tags.get(number)
    return labels[tag] if tag is not None and tag < len(labels) else ""
