"""The private parts of torch that captured graphs use, each with what stands in for it where a torch lacks it."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
#: `reinterpret_tensor(base, size, stride, offset)`: the memory of a tensor read in another way, `offset` elements after
#: its own beginning.
reinterpret_tensor: Callable[..., torch.Tensor] = getattr(_guards, "_reinterpret_tensor", None) or (
    lambda base, size, stride, offset: base.as_strided(size, stride, base.storage_offset() + offset)
)


def without_modes() -> Any:
    """A context in which torch calls run for real: compilers are called under fake tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def has_modes() -> bool:
    """Whether a dispatch mode sees the torch calls of this thread."""
    return bool(_modes())


def is_tracing() -> bool:
    """Whether Dynamo or AOTAutograd is compiling now, rather than something compiled running."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The mode of fake tensors, a context in which torch computes with them; None where none is among the values."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(values)


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether torch.compile has made this module."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def aot_backend(**arguments: Any) -> Callable[..., Any]:
    """AOTAutograd as a backend of torch.compile.

    Args:
        arguments: compilers of forward and backward graphs, the partitioner, decompositions; see
            `torch._dynamo.backends.common.aot_autograd`.
    """
    from torch._dynamo.backends.common import aot_autograd

    made: Callable[..., Any] = aot_autograd(**arguments)
    return made


def keep_saved_tensors() -> None:
    """Of the graph whose backward is compiled now: no kept tensor is donated to it, so it may run again.

    AOTAutograd counts what nothing outside sees as donated, for backends that write over it, and refuses to keep a
    graph (`retain_graph`, `create_graph`) whose backward was compiled by a pass that did not.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    if getattr(metadata, "bw_donated_idxs", None):
        metadata.bw_donated_idxs = []


def with_second_derivatives_refused(
    call: Callable[..., Any], error: Callable[[], Exception], on_run: Sequence[Callable[[], None]] = ()
) -> Callable[..., Any]:
    """A compiled graph, as AOTAutograd made it, whose gradients raise this error where they are differentiated.

    AOTAutograd's own RuntimeError stays where this torch does not have the class that is looked for here.

    Args:
        on_run: called before the graph runs, each time.
    """
    seen = False

    def run(*args: Any) -> Any:
        nonlocal seen
        for observer in on_run:
            observer()
        outputs = call(*args)
        seen = seen or _refuse_second_derivatives(outputs, error)
        return outputs

    return run


def _refuse_second_derivatives(outputs: Any, error: Callable[[], Exception]) -> bool:
    """Whether an output was made by the autograd function whose second derivatives are to be refused."""
    for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        node = compiled_node(output)
        if node is not None:
            function = node._forward_cls
            differentiable = function._double_backward

            def refuse(gradients: Any) -> None:
                raise error()

            def refusing(*args: Any, differentiable: Any = differentiable) -> Any:
                gradients = differentiable(*args)
                for node in {g.grad_fn for g in gradients if isinstance(g, torch.Tensor) and g.grad_fn is not None}:
                    node.register_prehook(refuse)
                return gradients

            function._double_backward = staticmethod(refusing)
            return True
    return False


def compiled_node(made: Any) -> Any:
    """The autograd node of a graph compiled by AOTAutograd: of a tensor that it made, or the node itself; else None."""
    node = getattr(made, "grad_fn", made)
    return node if hasattr(getattr(node, "_forward_cls", None), "_double_backward") else None


@contextmanager
def on_stand_ins(inputs: Sequence[Any]) -> Iterator[None]:
    """While this lasts, torch computes with fake tensors, autograd records, and nobody's saved-tensor hooks are called.

    Args:
        inputs: fake tensors of one mode, and sizes.

    Raises:
        ValueError: there is no fake tensor among them.
    """
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    fakes = fake_mode_of(inputs)
    if fakes is None:
        raise ValueError("no fake tensors")
    allowed, fakes.allow_non_fake_inputs = fakes.allow_non_fake_inputs, True
    try:
        with _disable_saved_tensors_hooks_during_tracing(), fakes, torch.enable_grad():
            yield
    finally:
        fakes.allow_non_fake_inputs = allowed


def compile_part(
    compile: Callable[..., Any], part: torch.fx.GraphModule, whole: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Callable[..., Any], Any]:
    """Compiles a part of a graph of Dynamo, as torch's own DDPOptimizer does: several graphs in one tracing context.

    Args:
        compile: the backend.
        part: its placeholders have the names and the meta of the nodes of `whole` that they stand for.
        inputs: fake tensors and sizes.

    Returns: the compiled part, and what it returns, as fake tensors with strides, aliases and gradients.
    """
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
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
    fakes = context.fake_mode
    allowed, fakes.allow_non_fake_inputs = fakes.allow_non_fake_inputs, True
    try:
        with _disable_saved_tensors_hooks_during_tracing(), fakes:
            return compiled, compiled(*inputs)
    finally:
        fakes.allow_non_fake_inputs = allowed


def hint(size: Any) -> int:
    """A size as a number; of a symbolic one the size that it was traced with, without fixing it."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return 4096 if known is None else int(known)
    return int(size)


def is_size(size: torch.SymInt) -> bool:
    """Whether a symbolic number follows from the sizes and integers of a call, and from no tensor's values."""
    return size.node.hint is not None


def is_transformed() -> bool:
    """Whether something looks on that must see a module's own forward: compilers, exporters, tracers, transforms,
    forward-mode differentiation, hooks on all modules."""
    return bool(
        _is_compiling()
        or _tracing_state() is not None
        or _transforms_active()
        or (_modes() and (_mode(_PROXY) is not None or _mode(_FUNCTIONAL) is not None))
        or _is_fx_tracing()
        or any(_hooks_on_all)
        or _forward_ad._current_level >= 0
    )


def is_batched() -> bool:
    """Whether a transform of torch.func is going on, or `autograd.grad(is_grads_batched=True)`: tensors may be batches,
    and have no memory of their own."""
    return bool(_transforms_active() or _includes(_BATCHES))


def has_saved_tensors_hooks() -> bool:
    """Whether hooks are called with what autograd keeps: of `saved_tensors_hooks`, of activation checkpointing."""
    return _saved_tensors_hooks(True) is not None


def has_streams(graph: torch.fx.Graph) -> bool:
    """Whether a graph of Dynamo's enters streams of a device, or waits for them: they are marks on its nodes."""

    def is_marked(node: torch.fx.Node) -> bool:
        marks = node.meta.get("custom") or {}
        value = node.meta.get("example_value")
        return "stream" in marks or isinstance(value, (torch.Stream, torch.Event)) or _namespace(node) == "streams"

    return any(map(is_marked, graph.nodes))


def _namespace(node: torch.fx.Node) -> str:
    return getattr(node.target, "namespace", "")


# Every call of a fused model asks these: names of this module are read sooner than attributes of attributes.
_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_transforms_active = torch._C._are_functorch_transforms_active
_is_fx_tracing = torch.fx._symbolic_trace.is_fx_symbolic_tracing
_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_hooks_on_all: list[Any] = [
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks", ())
    for kind in ("forward_pre", "forward", "backward_pre", "backward")
]
_includes, _BATCHES = torch._C._dispatch_tls_is_dispatch_key_included, torch._C._dispatch_key_parse("VmapMode")
_forward_ad: Any = torch.autograd.forward_ad
_saved_tensors_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None)
_PROXY, _FUNCTIONAL = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL


# -- Dynamo: branches on parameters. Where a torch lacks one of these parts, such a branch ends the graph, as it does
# -- under other backends.


def before_jumps(outcome: Callable[[Any, torch.fx.Node], bool | None]) -> None:
    """Asks `outcome` before each conditional jump on a tensor in a traced frame.

    Args:
        outcome: of Dynamo's translator and the tensor's node: the truth value to go on with; None: leave it to Dynamo.
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
                    self.stack[-1] = ConstantVariable.create(found)
            return handle(self, instruction)

        return jump

    for known in classes:
        for name, code in dis.opmap.items():
            if ("JUMP" in name and "_IF_" in name and "NONE" not in name) or name == "UNARY_NOT":
                handle = known.dispatch_table[code]
                if handle is not None:
                    known.dispatch_table[code] = asking(handle)


def output_graph(translator: Any) -> Any:
    """The graph that a translator of Dynamo adds to."""
    return translator.output


def backend_of(output: Any) -> Any:
    """The backend function that a graph of Dynamo is for."""
    backend = output.compiler_fn
    splitter = getattr(backend, "__self__", None)  # DDPOptimizer cuts a graph where buckets of gradients end
    backend = getattr(splitter, "backend_compile_fn", backend)
    for name in ("compiler_fn", "_torchdynamo_orig_callable", "_torchdynamo_orig_backend", "inner_compiler"):
        while hasattr(backend, name):
            backend = getattr(backend, name)
    return getattr(backend, "func", backend)  # a partial


def parameter_of(placeholder: torch.fx.Node) -> tuple[torch.Tensor, str] | None:
    """The parameter or buffer that an input of Dynamo's graph is, and how Python reaches it; None for other inputs."""
    given: Any = placeholder.meta.get("grapharg")
    source = getattr(given, "source", None)
    if source is None:
        return None
    tensor = given.example
    name = source.name if isinstance(source.name, str) else source.name()
    is_parameter = isinstance(tensor, torch.nn.Parameter) or "_buffers[" in name
    return (tensor, name) if is_parameter and type(tensor) in (torch.Tensor, torch.nn.Parameter) else None


def memory_of(node: torch.fx.Node) -> int | None:
    """What is equal for values of Dynamo's graph that share memory; None for what is no tensor."""
    return storage_key(node.meta.get("example_value"))


def storage_key(value: Any) -> int | None:
    """What is equal for tensors that share memory; None for what has no storage of its own, or is no tensor."""
    if not isinstance(value, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return None
    return value.untyped_storage()._cdata if value.layout is torch.strided else None


def draws_random_numbers(node: torch.fx.Node) -> bool:
    """Whether a call of Dynamo's graph, of a torch function or method, gives another result each time."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(
        word in name
        for word in ("rand", "bernoulli", "dropout", "normal", "poisson", "multinomial", "uniform", "rrelu", "gumbel")
    )


def add_guard(translator: Any, make: Callable[[], tuple[list[str], Callable[[Any], bool]]]) -> None:
    """Adds a guard to what a translator of Dynamo compiles.

    Args:
        make: called when the graph is complete: Python expressions of values, and a check of these values.
    """
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    def create(builder: Any, guard: Any) -> None:
        names, check = make()
        code = f"lambda L: ({''.join(name + ', ' for name in names)})"
        values = eval(code, {"G": builder.scope["G"], **_closure_of_guards()})
        builder.guard_manager.root.add_epilogue_lambda_guard(
            lambda frame: check(values(frame)), ["branches on parameters go as they went"], None
        )

    translator.output.guards.add(Guard(GlobalStateSource(), create))


def _closure_of_guards() -> dict[str, Any]:
    from torch._dynamo.guards import _get_closure_vars

    found: dict[str, Any] = _get_closure_vars()
    return found


def saved_outputs(output: torch.fx.Node) -> list[bool]:
    """For each output of a forward graph, whether it is kept for backward."""
    described = output.meta.get("desc") or []
    return ["SavedForBackwards" in type(d).__name__ for d in described]


@contextmanager
def graph_breaks() -> Iterator[list[tuple[str, str]]]:
    """While this lasts, Dynamo notes its graph breaks: afterwards the list has each line once, with the reason."""
    noted: list[Any] = getattr(torch._dynamo.utils, "graph_break_reasons", [])
    before = len(noted)
    found: list[tuple[str, str]] = []
    try:
        yield found
    finally:
        for reason in noted[before:]:
            if reason.user_stack and getattr(reason, "graph_break", True):
                frame = reason.user_stack[-1]
                where = f"{frame.filename}:{frame.lineno}: {frame.line}"
                if where not in (line for line, _ in found):  # Dynamo notes a branch twice, in other words
                    found.append((where, str(reason.reason).splitlines()[0]))
