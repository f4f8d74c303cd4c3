"""Fusion as an onnx_ir pass, for use with other passes in its Sequential or PassManager."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import FunctionalPass, PassResult, PostconditionError, PreconditionError

from opgraph.onnx.library.build import NATIVE
from opgraph.onnx.load import load
from opgraph.onnx.request import DEFAULT_TARGET, Request, checked_cuda, checked_keep
from opgraph.onnx.save import drafted, library_written
from opgraph.onnx.signature import DOMAIN
from opgraph.onnx.source import Source
from opgraph.onnx.target import checked_form, checked_opset, target_of


class FusePass(FunctionalPass):
    """`opgraph.onnx.fuse` for an onnx_ir.Model: writes named units, or all fused partitions, as single nodes.

    The given model is not changed. A model with nothing (more) to fuse is returned equal and marked as not modified.

    Args:
        form, target, functions, opset, ort_library, march, cuda, keep: as for `opgraph.onnx.save`.

    Raises:
        InvalidArguments: unknown form or target.
    """

    def __init__(
        self,
        *,
        form: str = "auto",
        target: str = DEFAULT_TARGET,
        functions: bool = False,
        opset: int | None = None,
        ort_library: str | Path | None = None,
        march: str = NATIVE,
        cuda: bool = False,
        keep: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.target = target_of(target)
        self.request = Request(
            form=checked_form(form),
            target=target,
            functions=functions,
            opset=checked_opset(opset),
            library=ort_library is not None,
            cuda=checked_cuda(cuda, ort_library),
            keep=checked_keep(keep),
        )
        self.library = (ort_library, march)

    def requires(self, model: ir.Model) -> None:
        """Checks that the target reads the requested or the model's opset, and that every initializer has a value."""
        opset = self.request.opset or model.opset_imports.get("", 0)
        if opset > self.target.opset:
            raise PreconditionError(
                f"the model is of opset {opset}, {self.target.name} reads up to {self.target.opset}"
            )
        empty = [name for name, value in model.graph.initializers.items() if value.const_value is None]
        if empty:
            raise PreconditionError(f"initializer {empty[0]!r} has no value")

    def call(self, model: ir.Model) -> PassResult:
        """Returns a new model.

        Raises:
            OpGraphError: as `opgraph.onnx.load` and `save`.
        """
        graph = load(model)
        assert isinstance(graph.source, Source)
        before = graph.source.origin.skeleton
        draft = drafted(graph, self.request)
        path, march = self.library
        if path is not None:
            library_written(draft, path, march)
        unfolded = len(before.functions) != len(model.functions)
        return PassResult(draft.ir_model(), modified=unfolded or draft.skeleton != before)

    def ensures(self, model: ir.Model) -> None:
        """Checks that the target reads the model, and that every opgraph function that is called is defined."""
        if (model.ir_version or 0) > self.target.ir_version or model.opset_imports.get("", 0) > self.target.opset:
            raise PostconditionError(f"{self.target.name} does not read ir_version {model.ir_version}")
        for node in model.graph.all_nodes():
            if node.domain == DOMAIN and node.op_identifier() not in model.functions:
                raise PostconditionError(f"node {node.name!r} calls {node.op_type}, which is not defined")
