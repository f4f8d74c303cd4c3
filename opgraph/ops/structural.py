"""An op without a computation: End."""

from __future__ import annotations

from opgraph.ir import dtypes
from opgraph.ir.logical_tensor import Dims, LogicalTensor
from opgraph.ir.opdef import Attrs, OpDef, Port, register

_ANY = {"T": (*dtypes.BY_NAME, dtypes.UNDEF)}


def _nothing_known(inputs: tuple[LogicalTensor, ...], attrs: Attrs) -> tuple[Dims, ...]:
    return ()


END = register(
    OpDef(
        kind="End",
        doc="Keeps its input as an output of the graph. It is in no partition.",
        family="structural",
        inputs=(Port(name="src"),),
        outputs=(),
        types=_ANY,
        infer=_nothing_known,
        onnx="none: an ONNX graph lists its outputs",
        source="oneDNN Graph End",
    )
)
