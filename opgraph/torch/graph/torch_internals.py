"""The private parts of torch's compilers that captured graphs use, each with a fallback for versions that lack it.

The private parts of torch that calls use, compiled or not, are in `opgraph/runtime/providers/torch_internals.py`.
"""

from __future__ import annotations

import dis
import importlib
import math
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from types import MethodDescriptorType
from typing import Any

import torch

# Without a fallback: torch's decompositions, its rules for memory order, and its trees of arguments.
from torch._decomp import get_decompositions as get_decompositions
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from opgraph.runtime.providers.torch_internals import FakeTensor, dispatch_modes, fake_mode_of


def order_in_memory(*operands: torch.Tensor) -> list[int]:
    """The axes of a result of torch's elementwise kernels in memory order, the outermost first.

    Args:
        operands: tensors of one shape.
    """
    order, _ = compute_elementwise_output_logical_to_physical_perm(*operands)
    return list(order)


#: The negative of a tensor, in the same memory: reads negate the stored elements.
neg_view = torch._neg_view


def is_wrapped(module: torch.nn.Module) -> bool:
    """True if torch.compile made this module."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def import_dynamo() -> None:
    """Imports Dynamo and AOTAutograd, which takes a second or two in a new process."""
    for name in ("torch._dynamo", "torch._functorch.aot_autograd"):
        importlib.import_module(name)


def aot_backend(**arguments: Any) -> Callable[..., Any]:
    """AOTAutograd as a backend of torch.compile, without Inductor's modules, which torch's own backend loads for a log.

    Args:
        arguments: compilers of forward and backward graphs, the partitioner, decompositions; see
            `torch._dynamo.backends.common.aot_autograd`, which compiles graphs with lists among their inputs.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import counters
    from torch._functorch.aot_autograd import aot_module_simplified

    def compile(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if any(isinstance(given, (list, tuple, dict)) for given in inputs):
            return aot_autograd(**arguments)(graph, inputs)
        counters["aot_autograd"]["total"] += 1  # by this DDPOptimizer detects that it must make the first, fake call
        return disable(aot_module_simplified(graph, inputs, **{**arguments, "bw_compiler": backward}))

    disable: Any = torch.compiler.disable
    compiler = disable(arguments["bw_compiler"])  # called by backward, where Dynamo may be enabled

    def backward(*given: Any) -> Any:
        return disable(compiler(*given))

    return compile


def min_cut(
    joint: torch.fx.GraphModule,
    inputs: Any,
    arguments: dict[str, Any],
    **settings: Any,
) -> Any:
    """torch's own split of a joint graph, in which equal calls are merged, into forward and backward.

    Args:
        arguments: those with which AOTAutograd calls a partitioner.
        settings: see `functorch_settings`.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with functorch_settings(cse=False, **settings):
        return min_cut_rematerialization_partition(joint, inputs, **arguments)


def recompute_in_backward(node: torch.fx.Node) -> None:
    """Tags a call for torch's partitioner as activation checkpointing does.

    Activation checkpointing also gives each call the number of its checkpoint. Some versions of torch compare the
    numbers of two tagged calls without a check that they exist; NaN is greater than no number.
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta.setdefault("ac_graph_id", math.nan)


def functorch_settings(**settings: Any) -> AbstractContextManager[Any]:
    """A context in which AOTAutograd has these settings of `torch._functorch.config`."""
    from torch._functorch import config

    patched: AbstractContextManager[Any] = config.patch(**settings)
    return patched


def checkpoints_that_draw() -> AbstractContextManager[Any]:
    """A context in which AOTAutograd accepts checkpoints that draw random numbers in graphs without gradients.

    It refuses them (torch 2.13), because it would recompute them in a backward pass that such a graph may contain.
    """
    from torch._functorch import config

    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    return functorch_settings(**{name: False}) if hasattr(config, name) else nullcontext()


def keep_saved_tensors() -> None:
    """Clears the donated saved tensors of the graph whose backward is compiled now, so that backward may run again.

    AOTAutograd declares saved tensors without other references donated, for backends that overwrite them. It refuses to
    keep a graph (`retain_graph`, `create_graph`) whose backward was compiled by a pass that did not keep it.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    donated = getattr(metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()  # in a graph of tensor subclasses, a second metadata object has the same list


def refuse_second_derivatives(node: Any, error: Callable[[], Exception]) -> None:
    """Makes the gradients of a compiled graph's autograd node, as AOTAutograd made it, raise an error when they are
    differentiated."""
    function = node._forward_cls
    differentiable = function._double_backward

    def refuse(gradients: Any) -> None:
        raise error()

    def refusing(*args: Any) -> Any:
        gradients = differentiable(*args)
        for made in {g.grad_fn for g in gradients if isinstance(g, torch.Tensor) and g.grad_fn is not None}:
            made.register_prehook(refuse)
        return gradients

    function._double_backward = staticmethod(refusing)


def compiled_node(made: Any) -> Any:
    """The autograd node of a graph compiled by AOTAutograd, for a tensor that it made or for the node; else None."""
    node = getattr(made, "grad_fn", made)
    return node if hasattr(getattr(node, "_forward_cls", None), "_double_backward") else None


@contextmanager
def on_stand_ins(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """A context in which torch computes with fake tensors, and no saved-tensor hooks are called.

    Ops run in the forms that Dynamo traces. For some ops the C++ form reads sizes as numbers (`F.pad`), which would
    specialize symbols to the sizes of this call. So would fake tensors made from real ones: Dynamo's are used instead.

    Args:
        graph: Dynamo's graph.
        inputs: the inputs of the graph, as a backend receives them: real or fake tensors, and sizes.

    Yields: the inputs, with fake tensors for real ones.

    Raises:
        ValueError: there is no fake tensor mode with which the graph is compiled.
    """
    from torch._dispatch.python import enable_python_dispatcher

    fakes = fake_mode_of(inputs)
    if fakes is None:
        raise ValueError("no fake tensors")
    places = graph.graph.find_nodes(op="placeholder")
    known = [n.meta.get("example_value", t) for n, t in zip(places, inputs, strict=True)]
    is_real = [isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor) for t in inputs]
    made = [fakes.from_tensor(fake) if real else t for fake, real, t in zip(known, is_real, inputs, strict=True)]
    with _faking(fakes), enable_python_dispatcher(), torch.set_grad_enabled(torch.is_grad_enabled()):
        yield made


@contextmanager
def _faking(fakes: Any) -> Iterator[None]:
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    allowed, fakes.allow_non_fake_inputs = fakes.allow_non_fake_inputs, True
    try:
        with _disable_saved_tensors_hooks_during_tracing(), fakes:
            yield
    finally:
        fakes.allow_non_fake_inputs = allowed


def compile_part(
    compile: Callable[..., Any], part: torch.fx.GraphModule, whole: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Callable[..., Any], Any]:
    """Compiles a part of a graph of Dynamo, as torch's own DDPOptimizer does: several graphs in one tracing context.

    Args:
        compile: the backend.
        part: its placeholders have the names and the meta of the nodes of `whole` that they replace.
        inputs: fake tensors and sizes.

    Returns: the compiled part, and its results, as fake tensors with strides, aliases and gradients.
    """
    from torch._guards import TracingContext

    sources = {n.name: getattr(n, "_dynamo_source", None) for n in whole.graph.find_nodes(op="placeholder")}
    for place in part.graph.find_nodes(op="placeholder"):
        place._dynamo_source = sources.get(place.name)
    part.meta = whole.meta
    part._param_name_to_source = getattr(whole, "_param_name_to_source", {})  # type: ignore[assignment]
    context: Any = TracingContext.get()
    context.fakify_first_call = True
    try:
        compiled = compile(part, inputs)
    finally:
        context.fakify_first_call = False
    with _faking(context.fake_mode):
        return compiled, compiled(*inputs)


def with_number(value: Any) -> Any:
    """Converts a fake tensor of Dynamo to one with which backends compile, and keeps the symbol of its `item()`;
    returns other values unchanged.

    AOTAutograd makes such a tensor without the symbol, and fails if the graph reads the symbol: an attribute of a
    module that is a number and changes from call to call.
    """
    from torch._guards import TracingContext

    number = getattr(value, "item_memo", None)
    context: Any = TracingContext.try_get()
    if number is None or context is None or context.fake_mode in (None, value.fake_mode):
        return value
    made = context.fake_mode.from_tensor(value)
    made.item_memo = number
    return made


def hint(size: Any) -> int:
    """A size as a number; for a symbolic one the size that it was traced with, without specializing it."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return 4096 if known is None else int(known)
    return int(size)


def is_nested_size(value: Any) -> bool:
    """True if a symbolic size represents the lengths of a nested tensor's rows, and has no number."""
    return isinstance(value, torch.SymInt) and value.node.is_nested_int()


def has_constant_rows(value: Any) -> bool:
    """True if the number of all rows of a nested tensor, as Dynamo traces it, is a constant.

    It is a constant if the values are a view, and no guard compares it then (torch 2.13).
    """
    if not (isinstance(value, torch.Tensor) and value.is_nested and hasattr(value, "_ragged_idx")):
        return False
    nested: Any = value
    rows = nested._values.shape[nested._ragged_idx - 1]
    return not isinstance(rows, torch.SymInt) or rows.node.maybe_as_int() is not None


def python_text(expression: Any) -> str | None:
    """An expression of symbolic sizes as a Python expression, which reads `math` and `torch`; None if torch cannot
    print it."""
    from torch.utils._sympy.printers import PythonPrinter

    try:
        return str(PythonPrinter().doprint(expression))
    except (AssertionError, NotImplementedError, TypeError):
        return None


def allows(size: torch.SymInt, sizes: Mapping[Any, int]) -> bool:
    """True if the ranges of symbols, and the guards that contain no other ones, allow them to have these values.

    Args:
        size: any size of the graph; the ranges and guards of its symbols are those of the whole graph.
        sizes: symbol -> value.
    """
    known = size.node.shape_env
    ranges = [(known.var_to_range.get(symbol), value) for symbol, value in sizes.items()]
    if any(found is not None and not found.lower <= value <= found.upper for found, value in ranges):
        return False
    # SymPy would simplify the rest of the other guards, which takes minutes if there are many.
    own = (guard.expr for guard in known.guards if _symbols(guard.expr) <= sizes.keys())
    try:
        return False not in (expression.xreplace(sizes) for expression in own)  # SymPy's equals Python's
    except ArithmeticError:  # a remainder of a division by 0
        return False


@lru_cache(maxsize=4096)
def _symbols(expression: Any) -> set[Any]:
    found: set[Any] = expression.free_symbols
    return found


def is_size(size: torch.SymInt) -> bool:
    """True if a symbolic number depends on the sizes and integers of a call, and on no tensor's values."""
    return size.node.hint is not None


#: The function that Dynamo writes into a graph where the grad mode changes.
SET_GRAD_ENABLED: Any = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


# -- Dynamo's entry. torch imports Dynamo at its first use, which takes a second: so the uses are inside functions.


def capture_errors() -> tuple[type[BaseException], ...]:
    """The errors that torch.compile raises if it cannot capture or compile a call."""
    return (torch._dynamo.exc.TorchDynamoException,)


def compile_lock() -> AbstractContextManager[Any]:
    """The lock that Dynamo holds while it compiles; a lock of opgraph if this torch has none of that name."""
    held: AbstractContextManager[Any] = getattr(torch._dynamo.convert_frame, "compile_lock", _LOCK)
    return held


_LOCK = threading.RLock()


def optimized(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    changed: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """torch.compile of a function.

    Args:
        changed: receives Dynamo's callback for frames without compiled code, and returns its replacement.
    """
    context: Any = torch._dynamo.optimize(backend)
    callback = getattr(context, "callback", None)
    if callback is not None:
        callback = context.callback = changed(callback)
    made: Callable[..., Any] = context(function)
    eval_frame: Any = torch._dynamo.eval_frame
    functorch: Any = torch._C._functorch
    #: Sets the callback of Python for the frames of this thread.
    enter: Any = getattr(eval_frame, "set_eval_frame", None)
    is_known = hasattr(getattr(eval_frame, "_stance", None), "backend") and hasattr(
        functorch, "pop_dynamic_layer_stack_and_undo_to_depth"
    )
    if callback is None or enter is None or not is_known or torch._dynamo.config.compiled_autograd:
        return made
    has_run = False

    def run(*args: Any, **kwargs: Any) -> Any:
        """Enters Dynamo without torch.compile's wrapper, which takes 9 us, if the wrapper has nothing to decide."""
        nonlocal has_run
        stance = eval_frame._stance
        if not has_run or stance.stance != "default" or stance.backend is not None or dispatch_modes():
            result = made(*args, **kwargs)
            has_run = True
            return result
        depth = functorch.get_dynamic_layer_stack_depth()
        before = enter(callback)
        try:
            return function(*args, **kwargs)
        finally:
            enter(before)
            if functorch.get_dynamic_layer_stack_depth() != depth:  # an error inside a transform of torch.func
                functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)

    return run


#: Guards that Dynamo omits by default: on hooks of submodules; that parameters and buffers which were different tensors
#: still are; and, in torch 2.11, on `requires_grad` of parameters.
_GUARDS = (
    "skip_nnmodule_hook_guards", "skip_no_tensor_aliasing_guards_on_parameters",
    "skip_tensor_guards_with_matching_dict_tags",
)  # fmt: skip


def with_all_guards() -> AbstractContextManager[Any]:
    """A context in which Dynamo compiles with the guards that it would omit.

    Afterwards Dynamo drops its weak references to parameters, as it does for backends that it has names for:
    `torch.utils.swap_tensors` refuses a tensor that has one. Dynamo does not cut a graph if DistributedDataParallel has
    buckets smaller than the default size of its first one: torch's DDPOptimizer, which would cut it, refuses those.
    """
    active = getattr(torch.nn.parallel.DistributedDataParallel, "_get_active_ddp_module", lambda: None)()
    first = getattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 0)
    whole = {"optimize_ddp": False} if active is not None and active.bucket_bytes_cap < first else {}
    config = torch._dynamo.config
    settings = dict.fromkeys(_GUARDS, False) | {"invalidate_compile_context_weakrefs": True}
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    patched: AbstractContextManager[Any] = config.patch({**known, **whole})
    return patched


def run_frame(error: BaseException) -> Any:
    """The value that a callback of Dynamo returns so that Python runs a frame, and all frames below it, at this call.

    Args:
        error: the error of the frame's capture. If the frame cannot run as it is, None is returned.
    """
    types: Any = torch._dynamo.types
    # Raised if a frame that continues after a graph break cannot run as it is.
    behind_a_break: Any = getattr(torch._dynamo.exc, "ResumePrologueTracingError", ())
    is_known = all(hasattr(types, name) for name in ("ConvertFrameReturn", "FrameAction", "FrameExecStrategy"))
    if not is_known or isinstance(error, behind_a_break):
        return None
    skip = types.FrameAction.SKIP
    return types.ConvertFrameReturn(types.FrameExecStrategy(skip, skip), apply_to_code=False)


def has_code(found: Any) -> bool:
    """True if the value that Dynamo's callback returned for a frame has code for this call, and for similar ones."""
    return getattr(found, "guarded_code", None) is not None


def reached_limit(found: Any) -> str:
    """A text if a frame was compiled as often as Dynamo allows; else "".

    Args:
        found: the value that Dynamo's callback returned for the frame.

    Returns: the number of compilations, and the difference between the last call and the one before it.
    """
    types: Any = torch._dynamo.types
    action = getattr(getattr(found, "frame_exec_strategy", None), "cur_action", None)
    if action is None or action != getattr(getattr(types, "FrameAction", None), "RUN_ONLY", None):
        return ""
    metrics: Any = getattr(torch._dynamo.utils, "get_compilation_metrics", list)()
    reason = str(getattr(metrics[-1], "recompile_reason", "") or "") if metrics else ""
    _, _, differs = reason.partition(": ")
    first = " ".join(differs.splitlines()[0].split()) if differs else "Dynamo gave no reason"
    return f"compiled {torch._dynamo.config.recompile_limit} times; the last difference: {first}"


def run_as_written(reason: str) -> BaseException:
    """The error that a backend raises so that Dynamo runs the captured function in Python, and captures its callees."""
    return torch._dynamo.exc.SkipFrame(reason)


# -- Dynamo: branches on parameters. If a torch lacks one of these parts, such a branch ends the graph, as it does under
# -- other backends.


def before_jumps(outcome: Callable[[Any, torch.fx.Node], bool | None]) -> None:
    """Calls `outcome` before each conditional jump on a tensor in a traced frame.

    Args:
        outcome: called with Dynamo's translator and the tensor's node; returns the truth value to continue with, or
            None to leave the jump to Dynamo.
    """
    try:
        from torch._dynamo import symbolic_convert
        from torch._dynamo.variables import ConstantVariable, TensorVariable

        classes = [symbolic_convert.InstructionTranslatorBase]
        for known in classes:
            classes += known.__subclasses__()
    except (ImportError, AttributeError):
        return

    def asking(handle: Callable[..., Any]) -> Callable[..., Any]:
        def jump(self: Any, instruction: Any) -> Any:
            top = self.stack[-1]
            top = top.realize() if hasattr(top, "realize") else top
            if isinstance(top, TensorVariable):
                found = outcome(self, top.as_proxy().node)
                if found is not None:
                    depth, self.stack[-1] = len(self.stack), ConstantVariable.create(found)
                    handle(self, instruction)
                    if instruction.opname.endswith("_OR_POP") and len(self.stack) == depth:
                        self.stack[-1] = top  # the value of `a or b`, not its truth
                    return None
            return handle(self, instruction)

        return jump

    for known in classes:
        for name, code in dis.opmap.items():
            if ("JUMP" in name and "_IF_" in name and "NONE" not in name) or name == "UNARY_NOT":
                handle = known.dispatch_table[code]
                if handle is not None:
                    known.dispatch_table[code] = asking(handle)


def guard_methods(is_ours: Callable[[Any], bool]) -> None:
    """Adds a guard on a method of tensors that is a value, as in `self.act = torch.Tensor.relu`; called once.

    Dynamo omits it (torch 2.13): code that it compiled with one method then also runs if the value is another one.

    Args:
        is_ours: returns True for opgraph's backends; others compile as before.
    """
    try:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._dynamo.variables.torch import BaseTorchVariable

        create = BaseTorchVariable.create_with_source.__func__  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return

    def create_with_source(cls: Any, value: Any, source: Any) -> Any:
        if isinstance(value, MethodDescriptorType) and is_ours(backend_of(InstructionTranslator.current_tx().output)):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        return create(cls, value, source)

    BaseTorchVariable.create_with_source = classmethod(create_with_source)  # type: ignore[assignment, method-assign]


def backend_of(output: Any) -> Any:
    """The backend function of a graph of Dynamo."""
    backend = output.compiler_fn
    splitter = getattr(backend, "__self__", None)  # DDPOptimizer cuts a graph where buckets of gradients end
    backend = getattr(splitter, "backend_compile_fn", backend)
    for name in ("compiler_fn", "_torchdynamo_orig_callable", "_torchdynamo_orig_backend", "inner_compiler"):
        while hasattr(backend, name):
            backend = getattr(backend, name)
    return getattr(backend, "func", backend)  # a partial


def parameter_of(placeholder: torch.fx.Node) -> tuple[torch.Tensor, str] | None:
    """The parameter or buffer of an input of Dynamo's graph, and its Python expression; None for other inputs."""
    given: Any = placeholder.meta.get("grapharg")
    source = getattr(given, "source", None)
    if source is None:
        return None
    tensor = given.example
    name = source.name if isinstance(source.name, str) else source.name()
    is_parameter = isinstance(tensor, torch.nn.Parameter) or "_buffers[" in name
    return (tensor, name) if is_parameter and type(tensor) in (torch.Tensor, torch.nn.Parameter) else None


def is_random_number(placeholder: torch.fx.Node) -> bool:
    """True if an input of Dynamo's graph is a number of Python's `random`, which Dynamo draws before each call."""
    from torch._dynamo.source import RandomValueSource

    return isinstance(getattr(placeholder.meta.get("grapharg"), "source", None), RandomValueSource)


#: In a node's `meta`: a tensor that has the memory of the node's value, if its example has other memory.
MEMORY = "opgraph_memory"


def memory_of(node: torch.fx.Node) -> int | None:
    """A key that is equal for values of Dynamo's graph that share memory; None for values that are no tensors."""
    return storage_key(node.meta.get(MEMORY, node.meta.get("example_value")))


def storage_key(value: Any) -> int | None:
    """A key that is equal for tensors that share memory; None for tensors without own storage, and other values."""
    if not isinstance(value, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return None
    return value.untyped_storage()._cdata if value.layout is torch.strided else None


def add_guard(translator: Any, make: Callable[[], tuple[list[str], Callable[[Any], bool]]]) -> None:
    """Adds a guard to the code that a translator of Dynamo compiles.

    Args:
        make: called when the graph is complete; returns Python expressions of values, and a check of these values.
    """
    from torch._dynamo.guards import _get_closure_vars
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    def create(builder: Any, guard: Any) -> None:
        names, check = make()
        code = f"lambda L: ({''.join(name + ', ' for name in names)})"
        values = eval(code, {"G": builder.scope["G"], **_get_closure_vars()})
        builder.guard_manager.root.add_epilogue_lambda_guard(
            lambda frame: check(values(frame)), ["branches on parameters go as they went"], None
        )

    translator.output.guards.add(Guard(GlobalStateSource(), create))


def inputs_written_afterwards(joint: torch.fx.Graph, places: Container[int]) -> list[torch.fx.Node]:
    """The inputs of a joint graph that are written to after the forward: by AOTAutograd, according to the descriptions
    of its results, or by a later graph.

    Args:
        places: the places of inputs of Dynamo's graph to which a later graph writes.
    """
    described = joint.output_node().meta.get("desc") or []
    written = {getattr(d, "mutated_input", None) for d in described} - {None}
    inputs = {n: n.meta.get("desc") for n in joint.find_nodes(op="placeholder")}
    return [n for n, desc in inputs.items() if desc in written or getattr(desc, "idx", None) in places]


def saved_outputs(output: torch.fx.Node) -> list[bool]:
    """For each output of a forward graph: True if it is saved for backward."""
    described = output.meta.get("desc") or []
    return ["SavedForBackwards" in type(d).__name__ for d in described]


def graph_break_reasons() -> list[Any]:
    """The list in which Dynamo records its graph breaks."""
    noted: list[Any] = getattr(torch._dynamo.utils, "graph_break_reasons", [])
    return noted


def log_writers() -> list[tuple[Any, str, Any, list[Any]]]:
    """Functions of torch that write texts for logs, without those that this torch does not have.

    Returns: for each its module, its name, the value that it returns if there is nothing to write, and the logs.
    """
    from torch._dynamo import output_graph, symbolic_convert
    from torch._functorch._aot_autograd import graph_compile

    calls = [(output_graph, "trace_call_log"), (symbolic_convert, "trace_call_log")]
    writers: list[tuple[Any, str, Any, list[tuple[Any, str]]]] = [
        (symbolic_convert, "get_funcname", None, [*calls, (symbolic_convert, "trace_source_log")]),
        (graph_compile, "_log_joint_graph", None, [(graph_compile, "aot_joint_log")]),
        (graph_compile, "_log_fw_bw_graphs", (None, None), [(graph_compile, "aot_graphs_log")]),
    ]
    return [
        (module, name, instead, [getattr(owner, log) for owner, log in logs])
        for module, name, instead, logs in writers
        if hasattr(module, name) and all(hasattr(owner, log) for owner, log in logs)
    ]


def backend_named(name: str) -> Callable[..., Any]:
    """The backend of torch.compile with this name."""
    from torch._dynamo import lookup_backend

    found: Callable[..., Any] = lookup_backend(name)
    return found
