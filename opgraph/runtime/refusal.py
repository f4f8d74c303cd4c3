"""What is said when NVRTC refuses a kernel: its log, the emitted lines that it names, the ops that they came from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opgraph.codegen.kernel import KernelSource
from opgraph.errors import DeviceError

_SHOWN = 20
_LINE_NUMBER = re.compile(r"\((\d+)\): ")


def refused(log: str, source: KernelSource, labels: Sequence[str]) -> DeviceError:
    """The error for a log of NVRTC.

    Args:
        log: as NVRTC wrote it, lines such as `kernel.cu(12): error: ...`.
        labels: label of each op of the kernel, by tag.
    """
    code = source.code.splitlines()
    numbers = sorted({int(n) for n in _LINE_NUMBER.findall(log) if 0 < int(n) <= len(code)})
    text = [f"    {line}" for line in log.strip().splitlines()[:_SHOWN]]
    text += [f"    {number:5d} | {code[number - 1]}" for number in numbers[:_SHOWN]]
    tags = sorted({source.tags[n] for n in numbers if n in source.tags})
    return DeviceError(
        "\n".join([f"NVRTC refused kernel {source.entry}:", *text]),
        where=", ".join(labels[t] for t in tags if t < len(labels)) or f"kernel {source.entry}",
        fix="this is a bug of opgraph, unless CuPy or NVRTC is broken: report it with the source (f.kernels)",
    )
