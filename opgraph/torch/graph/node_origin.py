"""The origin of a node of a captured graph: the module, its class, the call, the line of the user's source."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Graph, Node

from opgraph.torch.tracing.trace_errors import LIBRARY

_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
#: In the meta of a node of a backward graph that the forward graph computes, too: its name there.
RECOMPUTED = "opgraph_recomputed"


@dataclass(frozen=True, slots=True)
class Origin:
    """The part of the user's program that made a value.

    Attributes:
        source: Dynamo's expression for the innermost module in the captured code; "" for the frame's own.
        module: the path of that module in the frame's, or in the model if that is known; "" for the whole.
        module_class: its class, "" for the whole.
        module_call: the number of this call of the module, from 1.
        call: the torch function or op.
        line: `file:line` of the source, "" if it is unknown.
        code: the text of that line.
    """

    source: str
    module: str
    module_class: str
    module_call: int
    call: str
    line: str
    code: str


def origin_of(node: Node) -> Origin:
    """The origin that Dynamo recorded for a node, or that of the forward node to which a backward node belongs."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    key, (path, kind) = list(stack.items())[-1] if stack else ("", ("", ""))
    functions = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack") or []
    call = str(functions[-1][0]) if functions else str(node.target)
    trace = (node.meta.get("stack_trace") or "").strip()
    found = [line for line in _LINE.finditer(trace) if not line["file"].startswith(LIBRARY)]
    code = trace[found[-1].end() :].strip().splitlines()[1:2] if found else []
    return Origin(
        source=path,
        module=_module_path(path),
        module_class=getattr(kind, "__name__", str(kind).rsplit(".", 1)[-1].rstrip("'>")) if kind else "",
        module_call=int(str(key).rpartition("@")[2]) + 1 if "@" in str(key) else 1,
        call=re.sub(r"_\d+$", "", call.removeprefix("aten.").split(".")[0]),
        line=f"{found[-1]['file']}:{found[-1]['line']}" if found else "",
        code=code[0].strip() if code else "",
    )


def mark_recomputed(backward: Graph, forward: Collection[str]) -> None:
    """Marks the nodes of a backward graph that the forward graph computes, too.

    Args:
        forward: the names of the nodes that the forward graph computes; both graphs take names from the joint one.
    """
    for node in backward.nodes:
        if node.op == "call_function" and node.name in forward:
            node.meta[RECOMPUTED] = node.name


def _module_path(source: str) -> str:
    """`L['module'].layer1.0` -> `layer1.0`; the same for `L['self']._modules['layer1']._modules['0']`."""
    without_root = re.sub(r"^[LG]\['[^']*'\](\[\d+\])*", "", source)
    return re.sub(r"\._modules\['([^']*)'\]", r".\1", without_root).strip(".")
