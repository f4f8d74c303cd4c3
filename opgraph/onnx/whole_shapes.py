"""Shape nodes that are not needed, because their readers become ops that read the shape from the value itself."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import GraphProto, NodeProto

from opgraph.onnx.forms import kinds_of
from opgraph.runtime.providers.onnx_node import KIND_KEY

SHAPE = "Shape"


def whole_shapes(graph: GraphProto, opset: int, library: bool) -> dict[str, tuple[int, NodeProto]]:
    """Maps output names to the Shape nodes, with their positions, that return the whole shape of a value and are read
    only by nodes that may become ops that read the shape from the value itself.

    Args:
        library: True if unmarked nodes become library ops, too.
    """
    found = {n.output[0]: (place, n) for place, n in enumerate(graph.node) if _says_all(n)}
    for output in graph.output if found else ():
        found.pop(output.name, None)
    wanted: set[str] = set()
    for node in graph.node if found else ():
        for index, name in enumerate(node.input):
            if name not in found:
                continue
            if _by_value(node, index, opset) and (library or _is_marked(node)):
                wanted.add(name)
            else:
                del found[name]
    return {name: said for name, said in found.items() if name in wanted}


def _says_all(node: NodeProto) -> bool:
    return (
        node.op_type == SHAPE
        and node.domain == ""
        and len(node.input) == len(node.output) == 1
        and all(a.name == "start" and a.i == 0 and not a.ref_attr_name for a in node.attribute)
    )


def _by_value(node: NodeProto, index: int, opset: int) -> bool:
    forms: Sequence[tuple[str, ...]] = [f.inputs or () for _, f in kinds_of(node.op_type, opset)]
    return node.domain == "" and any(inputs[index : index + 1] and inputs[index][0] == "@" for inputs in forms)


def _is_marked(node: NodeProto) -> bool:
    return any(p.key == KIND_KEY for p in node.metadata_props)
