"""onnxruntime: the graph as ai.onnx ops, with every optimization that it has, on the given arrays."""

from __future__ import annotations

from typing import Any

from opgraph.bench.case import Case
from opgraph.bench.peers.peer import Absent, Built, Peer, Refused, dense
from opgraph.errors import OpGraphError

_PROVIDER = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def _find(device: str) -> str:
    try:
        import onnx  # noqa: F401  # writes the model
        import onnxruntime

        providers = onnxruntime.get_available_providers()
    except (ImportError, AttributeError) as error:
        raise Absent(str(error)) from None
    if _PROVIDER[device] not in providers:
        raise Absent(f"the installed one has no {_PROVIDER[device]}")
    return str(onnxruntime.__version__)


def session(model: bytes | str, threads: int, device: str = "cpu", *, spins: bool = False) -> Any:
    """A session that shares the machine: as many threads as the others; idle ones sleep, unless the others spin too.

    Args:
        model: a serialized model, or a file's path.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions
    options.intra_op_num_threads = threads
    if not spins:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, providers=[_PROVIDER[device]])


def _build(case: Case) -> Built:
    import onnxruntime

    from opgraph.onnx.save import to_model
    from opgraph.runtime.providers.onnx_session import ort_value

    dense(case)
    if case.entry.in_place:
        raise Refused("writes no result over an input")
    norms = any(step.kind == "RMSNorm" for step in case.entry.steps())
    try:
        model = to_model(case.graph, form="decomposed", opset=23 if norms else None).SerializeToString()
    except OpGraphError as error:
        raise Refused(error.what) from None
    try:
        made = session(model, case.threads, case.device)
    except Exception as error:  # its exception classes have no common base
        raise Refused(" ".join(str(error).split())[:200]) from None
    binding = made.io_binding()
    keep = [*case.feeds.values(), *case.outs.values()]
    for tensors, bind in (
        (case.graph.inputs, binding.bind_ortvalue_input),
        (case.graph.outputs, binding.bind_ortvalue_output),
    ):
        for tensor in tensors:
            name = tensor.name or ""
            array = case.feeds[name] if name in case.feeds else case.outs[name]
            if case.device == "cuda":
                value = onnxruntime.OrtValue.from_dlpack(array.__dlpack__())
            else:
                value = ort_value(onnxruntime, array, tensor)
            bind(name, value)

    def call(keep: Any = keep) -> None:
        made.run_with_iobinding(binding)

    return Built(call=call)


PEER = Peer(
    name="onnxruntime",
    get="pip install 'opgraph[ort]' (or 'opgraph[ort-gpu]' for a GPU)",
    find=_find,
    build=_build,
)
