"""Ops that opgraph does not support, and the gradients of those that come from an ONNX model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from opgraph.errors import InvalidGraphOp, Unimplemented
from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.op import Op
from opgraph.ir.opdef import Attrs, Builder, OpDef, Port, register
from opgraph.ops.foreign_gradients import NODE_RULES

_ANY = {"T": (*dtypes.BY_NAME, dtypes.UNDEF)}

#: ONNX op -> input -> the inputs whose gradients read its data; the gradients of the others need only its shape. Inputs
#: that are not listed are always read. So a reshape saves nothing for backward, and a convolution with frozen weights
#: does not save its input.
_READERS: dict[str, Mapping[int, Collection[int]]] = {
    "Conv": {0: (1,), 1: (0,), 2: ()},
    "ConvTranspose": {0: (1,), 1: (0,), 2: ()},
    "BatchNormalization": {0: (1, 4), 1: (0, 3, 4), 2: (), 3: (1, 4)},
}
_READERS.update((norm, {2: ()}) for norm in ("GroupNormalization", "InstanceNormalization", "LayerNormalization"))
_READERS.update(
    (linear, {0: ()})
    for linear in (
        "AveragePool", "CumSum", "DepthToSpace", "Dropout", "Expand", "Gather", "GatherElements", "GatherND",
        "GlobalAveragePool", "Pad", "ReduceMean", "ReduceSum", "Resize", "Slice", "SpaceToDepth", "Split", "Tile",
        "Trilu",
    )
)  # fmt: skip
#: ONNX ops with any number of inputs, whose gradients read the data of none of them.
_READ_NOTHING = ("Concat",)

#: Attributes of a WildcardBackward in addition to the node's: 1 for each input of the Wildcard whose gradient it
#: computes, and 1 for each output whose gradient it receives.
WANTED, GIVEN = "onnx_wanted_gradients", "onnx_given_gradients"


def _nothing_known(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    return ()


def _gradient(build: Builder, op: Op, d: Sequence[LogicalTensor | None]) -> Sequence[LogicalTensor | None]:
    """Uses native ops where they can express the node's gradient, else one WildcardBackward for the wanted gradients.

    Raises:
        Unimplemented: the op carries no ONNX node; or a gradient is wanted of an input that is not a tensor.
    """
    if "onnx_op" not in op.attrs:
        raise Unimplemented(
            "a Wildcard that carries no ONNX node has no gradient",
            where=op.where,
            fix="replace it by ops that opgraph knows, or leave what depends on it out of wrt",
        )
    rule = NODE_RULES.get(str(op.attrs["onnx_op"])) if op.attrs.get("onnx_domain", "") == "" else None
    if rule is not None and len(op.outputs) == 1 and d[0] is not None:
        made = rule(build, op, d[0])
        if made is not None:
            return made
    wanted = [build.wants(t) and _may_flow(op, i) for i, t in enumerate(op.inputs)]
    gradients = iter(
        build.like(
            "WildcardBackward",
            (*op.inputs, *[grad for grad in d if grad is not None]),
            [t for t, is_wanted in zip(op.inputs, wanted, strict=True) if is_wanted],
            op.name,
            {**op.attrs, WANTED: [int(w) for w in wanted], GIVEN: [int(grad is not None) for grad in d]},
        )
        if any(wanted)
        else ()
    )
    return [next(gradients) if is_wanted else None for is_wanted in wanted]


def _may_flow(op: Op, index: int) -> bool:
    """True if an input whose gradient is wanted may have one.

    Raises:
        Unimplemented: it is a sequence or the like, with unknown elements.
    """
    if op.inputs[index].dtype != dtypes.UNDEF:
        return True
    texts = op.attrs.get("onnx_input_types", ())
    text = texts[index] if isinstance(texts, tuple) and index < len(texts) else ""
    if isinstance(text, str) and text.startswith("tensor("):  # a dtype unknown to opgraph, hence without gradients
        return False
    raise Unimplemented(
        f'{op.attrs["onnx_op"]} "{op.name}" has no gradient: it reads {text or "a value of unknown type"}',
        where=op.where,
        fix="replace the node in the model, or leave what it depends on out of wrt",
    )


WILDCARD = register(
    OpDef(
        kind="Wildcard",
        doc=(
            "An op that opgraph does not know: any inputs, outputs and attributes, kept exactly. One that an ONNX "
            "model brought along carries its node in the attributes and runs in onnxruntime."
        ),
        family="structural",
        inputs=(Port(name="src", variadic=True),),
        outputs=(Port(name="dst", variadic=True),),
        types=_ANY,
        infer=_nothing_known,
        onnx="the node that it was imported from",
        gradient=_gradient,
        foreign="onnxruntime",
        source="oneDNN Graph Wildcard",
    )
)


# -- the gradient of a node --------------------------------------------------------------------------------------------


def _flags(attrs: Attrs, name: str) -> tuple[int, ...]:
    value = attrs.get(name, ())
    return tuple(int(v) for v in value) if isinstance(value, tuple) else ()


def _of_wanted(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    """The shapes of the inputs whose gradients are computed."""
    return tuple(t.dims for t, is_wanted in zip(inputs, _flags(attrs, WANTED)) if is_wanted)


def _carries_a_node(op: Op) -> None:
    """The op carries an ONNX node, and has as many inputs and outputs as its attributes say.

    Raises:
        InvalidGraphOp: it does not.
    """
    wanted, given = _flags(op.attrs, WANTED), _flags(op.attrs, GIVEN)
    counts = (len(wanted) + sum(map(bool, given)), sum(map(bool, wanted)))
    if "onnx_op" not in op.attrs or not any(given) or (len(op.inputs), len(op.outputs)) != counts:
        raise InvalidGraphOp(
            f"its attributes do not say what its {len(op.inputs)} inputs and {len(op.outputs)} outputs are",
            where=op.where,
            fix="let `opgraph.gradient` make such ops",
        )


def _read(op: Op) -> list[bool]:
    """For each input, True if its data is read: by a wanted gradient, or because it is a gradient itself."""
    wanted = _flags(op.attrs, WANTED)
    kind = str(op.attrs["onnx_op"]) if op.attrs.get("onnx_domain", "") == "" else ""
    readers = _READERS.get(kind, {})
    positions = _node_positions(len(wanted), _flags(op.attrs, "onnx_absent_inputs"))
    asked = {positions[i] for i, is_wanted in enumerate(wanted) if is_wanted}
    read = [kind not in _READ_NOTHING and (p not in readers or bool(asked & {*readers[p]})) for p in positions]
    return [*read, *[True] * (len(op.inputs) - len(wanted))]


def _node_positions(count: int, absent: Collection[int]) -> list[int]:
    """The position in the ONNX node of each input of an op."""
    return [i for i in range(count + len(absent)) if i not in absent][:count]


WILDCARD_BACKWARD = register(
    OpDef(
        kind="WildcardBackward",
        doc=(
            "The gradients of inputs of a Wildcard that carries an ONNX node, from its inputs and the gradients of its "
            "outputs. Torch runs the node again and differentiates it, BatchNormalization and Dropout in inference "
            "form. `opgraph.gradient` makes it."
        ),
        family="structural",
        inputs=(Port(name="src", variadic=True),),
        outputs=(Port(name="diff_src", variadic=True),),
        types=_ANY,
        infer=_of_wanted,
        onnx="none: ai.onnx has no gradients",
        gradient="ONNX nodes are differentiated once; opgraph.onnx.load(..., library=True) makes native ops of some",
        check=_carries_a_node,
        reads=_read,
        foreign="native",
        source="reverse accumulation over one node",
    )
)
