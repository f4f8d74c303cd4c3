"""The private parts of torch that captured graphs use, each with what stands in for it where a torch lacks it."""

from __future__ import annotations

import dis
import itertools
from collections.abc import Callable
from types import FunctionType
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


def is_tracing() -> bool:
    """Whether Dynamo or AOTAutograd is compiling now, rather than something compiled running."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


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


def with_second_derivatives_refused(call: Callable[..., Any], error: Callable[[], Exception]) -> Callable[..., Any]:
    """A compiled graph, as AOTAutograd made it, whose gradients raise this error where they are differentiated.

    AOTAutograd's own RuntimeError stays where this torch does not have the class that is looked for here.
    """
    seen = False

    def run(*args: Any) -> Any:
        nonlocal seen
        outputs = call(*args)
        seen = seen or _refuse_second_derivatives(outputs, error)
        return outputs

    return run


def _refuse_second_derivatives(outputs: Any, error: Callable[[], Exception]) -> bool:
    """Whether an output was made by the autograd function whose second derivatives are to be refused."""
    for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        function: Any = getattr(getattr(output, "grad_fn", None), "_forward_cls", None)
        if hasattr(function, "_double_backward"):
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


def hint(size: Any) -> int:
    """A size as a number; of a symbolic one the size that it was traced with, without fixing it."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return 4096 if known is None else int(known)
    return int(size)


#: What torch.compile raises where it cannot capture or compile a call.
CAPTURE_ERRORS: tuple[type[BaseException], ...] = (torch._dynamo.exc.TorchDynamoException,)


def compiled(call: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of a function, apart from whatever else was compiled of the same source.

    Dynamo keeps what it compiled, how often, and which sizes differed, by the code object and its place in a file. So
    the call is made from a copy of a function's code that has a place of its own.
    """
    code = _call.__code__.replace(co_filename=f"{__file__}#{next(_numbers)}")
    function = FunctionType(code, _call.__globals__, "forward")
    made = torch.compile(function, backend=backend)
    return lambda *args, **kwargs: made(call, args, kwargs)


_numbers = itertools.count()


def _call(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


class WithHookGuards:
    """A context in which Dynamo's guards see hooks that are added to a submodule later.

    It does what `torch._dynamo.config.patch` does in a third of the time: every call of a fused model enters it.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        config = torch._dynamo.config
        self._before = config.skip_nnmodule_hook_guards
        if self._before:
            config.skip_nnmodule_hook_guards = False

    def __exit__(self, *exception: object) -> None:
        if self._before:
            torch._dynamo.config.skip_nnmodule_hook_guards = True


def is_transformed() -> bool:
    """Whether something looks on that must see a module's own forward: compilers, exporters, tracers, transforms."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    )


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
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


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


def graph_breaks(call: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[str, str]]:
    """Where Dynamo ends graphs in a call, and why; runs it once."""
    import torch._dynamo

    torch._dynamo.reset()
    found = torch._dynamo.explain(call)(*args, **kwargs)
    breaks = []
    for reason in found.break_reasons:
        if not reason.user_stack or not getattr(reason, "graph_break", True):
            continue
        frame = reason.user_stack[-1]
        breaks.append((f"{frame.filename}:{frame.lineno}: {frame.line}", str(reason.reason).splitlines()[0]))
    return breaks
