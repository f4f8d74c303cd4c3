"""How a fused model enters Dynamo: torch.compile of one function, with guards and errors of opgraph's own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from opgraph.ir.collector import no_collector

_functorch: Any = torch._C._functorch
_eval_frame: Any = torch._dynamo.eval_frame
#: Sets what Python calls for the frames of this thread; None where this torch has other parts than `compiled` uses.
_set_eval_frame: Any = (
    getattr(_eval_frame, "set_eval_frame", None)
    if hasattr(getattr(_eval_frame, "_stance", None), "backend")
    and hasattr(_functorch, "pop_dynamic_layer_stack_and_undo_to_depth")
    else None
)
_modes = torch._C._len_torch_dispatch_stack
#: What torch.compile raises where it cannot capture or compile a call.
CAPTURE_ERRORS: tuple[type[BaseException], ...] = (torch._dynamo.exc.TorchDynamoException,)


def compiled(
    call: Callable[..., Any],
    backend: Callable[..., Any],
    failed: Callable[[BaseException], bool] = lambda error: False,
) -> Callable[..., Any]:
    """torch.compile of a function, apart from whatever else was compiled of the same source.

    Dynamo keeps what it compiled, how often, and which sizes differed, by the code object and its place in a file. So
    what runs is a copy of the function's code that has a place of its own. Its guards see hooks that are added
    to a submodule later, parameters that become one, and parameters that are frozen.

    Args:
        call: the function.
        backend: for its graphs.
        failed: called with what Dynamo raises where it cannot capture a frame. True: the frame runs as it was written,
            and no graph that ran before it in the same call runs again; False: the error is raised.
    """
    written: Any = call if isinstance(call, FunctionType) else lambda *args, **kwargs: call(*args, **kwargs)
    code = written.__code__.replace(co_filename=f"{__file__}#{next(_numbers)}")
    function = FunctionType(code, written.__globals__, "forward", written.__defaults__, written.__closure__)
    context: Any = torch._dynamo.optimize(backend)
    callback = getattr(context, "callback", None)
    if callback is not None:
        callback = context.callback = _with_all_guards(callback, failed)
    made: Callable[..., Any] = context(function)
    if callback is None or _set_eval_frame is None or torch._dynamo.config.compiled_autograd:
        return made
    has_run = False

    def run(*args: Any, **kwargs: Any) -> Any:
        """Enters Dynamo without torch.compile's wrapper, which takes 9 us, where that has nothing to decide."""
        nonlocal has_run
        stance = _eval_frame._stance
        if not has_run or stance.stance != "default" or stance.backend is not None or _modes():
            result = made(*args, **kwargs)
            has_run = True
            return result
        depth = _functorch.get_dynamic_layer_stack_depth()
        before = _set_eval_frame(callback)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(before)
            if _functorch.get_dynamic_layer_stack_depth() != depth:  # an error inside a transform of torch.func
                _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)

    return run


_numbers = itertools.count()


#: Guards that Dynamo leaves out unless they are asked for: on hooks of submodules; that parameters and buffers which
#: were different tensors still are; and, in torch 2.11, whether a parameter requires a gradient.
_GUARDS = {
    name: False
    for name in (
        "skip_nnmodule_hook_guards", "skip_no_tensor_aliasing_guards_on_parameters",
        "skip_tensor_guards_with_matching_dict_tags",
    )
    if hasattr(torch._dynamo.config, name)
}  # fmt: skip


def _with_all_guards(callback: Callable[..., Any], failed: Callable[[BaseException], bool]) -> Callable[..., Any]:
    """What Dynamo calls for a frame that it has no code for, with the guards that it would leave out."""

    @functools.wraps(callback)  # with the attributes by which Dynamo finds the backend
    def compile(*args: Any, **kwargs: Any) -> Any:
        try:
            with no_collector(), torch._dynamo.config.patch({**_GUARDS, **_whole_in_small_buckets()}):
                return callback(*args, **kwargs)
        except CAPTURE_ERRORS as error:
            if not _RUNS_FRAMES or isinstance(error, _NOT_RUN) or not failed(error):
                raise
            return _run_frame()

    return compile


def _whole_in_small_buckets() -> dict[str, Any]:
    """The setting with which Dynamo leaves a graph whole where DistributedDataParallel has buckets smaller than its
    first one is by default: torch's DDPOptimizer, which would cut the graph, refuses those."""
    active = getattr(torch.nn.parallel.DistributedDataParallel, "_get_active_ddp_module", lambda: None)()
    first = getattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 0)
    return {"optimize_ddp": False} if active is not None and active.bucket_bytes_cap < first else {}


def _run_frame() -> Any:
    """What a callback of Dynamo returns so that Python runs a frame, and all that it calls, at this call."""
    skip = _types.FrameAction.SKIP
    return _types.ConvertFrameReturn(_types.FrameExecStrategy(skip, skip), apply_to_code=False)


_types: Any = torch._dynamo.types
_RUNS_FRAMES = all(hasattr(_types, name) for name in ("ConvertFrameReturn", "FrameAction", "FrameExecStrategy"))
#: Raised where a frame that goes on behind a graph break cannot run as it is.
_NOT_RUN: Any = getattr(torch._dynamo.exc, "ResumePrologueTracingError", ())


def run_as_written(reason: str) -> BaseException:
    """What a backend raises so that Dynamo runs the Python function that it captured, and captures what that calls."""
    return torch._dynamo.exc.SkipFrame(reason)
