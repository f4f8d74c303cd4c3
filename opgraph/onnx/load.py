"""Reads an ONNX model into a finalized Graph."""

from __future__ import annotations

from opgraph.errors import ModelError, OpGraphError, Unimplemented
from opgraph.ir.graph import Graph
from opgraph.onnx.functions import unfolded
from opgraph.onnx.open_model import taken_apart
from opgraph.onnx.origin import ModelLike, Origin
from opgraph.onnx.reader import Reader
from opgraph.onnx.validate import validate


def load(model: ModelLike, *, library: bool = False) -> Graph:
    """Reads an ONNX model.

    Args:
        model: a path, an onnx.ModelProto, or an onnx_ir.Model. It is treated as untrusted input. Data files are
            mapped, not read. The tensors of an object in memory are shared, not copied: do not change them in place
            while the graph is in use.
        library: if True, matrix products, reductions and shape changes become native ops too, which have gradients and
            run in torch. Otherwise they stay Wildcards, which onnxruntime runs together with their neighbours.

    Returns: a finalized graph with exactly the model's inputs and outputs, in order. Pointwise nodes are native ops,
        in every spelling that the op records list. Every other node is a Wildcard that carries it exactly. Symbolic
        dimensions keep their names. `graph.source` refers to the model, so that `save` keeps the parts that the graph
        does not hold.

    Raises:
        ModelError: the file is missing, is no ONNX model, or is malformed; the message names the node or tensor.
        Unimplemented: the model is well-formed, but a part cannot be represented; the message names it.
    """
    origin: Origin | None = None
    try:
        origin = taken_apart(model)
        validate(origin)
        return imported(origin, library=library)
    except (ModelError, Unimplemented):
        raise
    except OpGraphError as error:
        if origin is None:
            raise
        raise ModelError(error.what, where=f"{error.where}, in {origin.label}", fix=error.fix) from error
    except Exception as error:  # a file that no check covers must not end in a foreign traceback
        text = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the model cannot be read: {type(error).__name__}: {text}",
            where=origin.label if origin is not None else str(model)[:200],
            fix="check it with onnx.checker.check_model(path, full_check=True)",
        ) from error


def imported(origin: Origin, *, library: bool = False) -> Graph:
    """The graph of a validated model; see `load` for `library`."""
    model = origin.skeleton
    origin.skeleton, notes = unfolded(model, origin.label)
    origin.folded = model if origin.skeleton is not model else None
    reader = Reader(origin, library)
    reader.graph.notes.extend(notes)
    if model.training_info:
        reader.graph.notes.append("training_info is carried, and not read")
    return reader.read()
