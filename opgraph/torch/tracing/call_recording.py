"""Recording of a call that no earlier run made: classifies the call and adds its node to the tree of calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import torch

from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.calls import Found, table
from opgraph.torch.tracing.emit import Emitter, compute_dtype, name_of, outcome
from opgraph.torch.tracing.expansions import (
    EXPANSIONS,
    FILLS,
    cast_target,
    fill_value,
    is_spread,
    is_view,
    repeat_arithmetic,
    same_arithmetic,
    spread_like,
    spread_over,
)
from opgraph.torch.tracing.proxy import LAYOUT, Proxy, answer, proxies
from opgraph.torch.tracing.result_layout import torch_call
from opgraph.torch.tracing.session import CHANGES, MAKES, RUNS, Node, Number, Session
from opgraph.torch.tracing.tensor_calls import draws, function_name


def record(
    session: Session,
    key: Hashable,
    before: int,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of a call; adds a node to the tree unless the call only queries metadata or expands to other calls.

    Args:
        before: the number of refs before the call's key was computed, which may have added some.

    Raises:
        OpGraphError: the call cannot be part of a fused function; the message names the user's line.
    """
    name = function_name(func) or str(func)
    answered, result = answer(name, args, kwargs)
    if answered:
        session.asks = True
        session.forget(before)
        return result
    if kwargs.get("out") is not None:
        raise trace_errors.writes(f"{name}(out=...)", "a tensor that was there before")
    if is_spread(name, args):
        session.forget(before)
        return session.call(spread_over, (args[0], spread_like(session, args, kwargs)), {})
    runs = _runs(name, args, kwargs)
    is_expansion = name in EXPANSIONS and not runs
    if is_expansion or (name in ("to", "type_as") and not isinstance(args[0], Proxy)):
        session.forget(before)
        return EXPANSIONS.get(name, EXPANSIONS["view_as"])(session, func, args, kwargs)
    node = Node(session.node, session.count)
    emitter = Emitter(session, name)
    if runs:
        node.action = RUNS
    elif func is spread_over:
        _spread(node, emitter, *args)
    elif func is same_arithmetic:
        _made(node, repeat_arithmetic(emitter, args), args[0].dtype)
    elif is_view(name) and func not in table():
        refuse(name, args)
    elif (target := cast_target(name, args, kwargs)) is not None:
        x, node.alone = args[0], True
        if target is not x.dtype:
            _made(node, emitter.convert(x.ref, name_of(x.dtype, name), name_of(target, name)), target)
        elif kwargs.get("copy") or (name == "to" and [type(a) for a in args[-2:]] == [bool, bool] and args[-1]):
            _made(node, emitter.step("Identity", (x.ref,), name_of(target, name)), target)
    elif (fill := fill_value(name, args, kwargs)) is not None:
        value, dtype = fill
        own = name_of(dtype, name)
        _made(node, emitter.step("BroadcastTo", (Number(value, own), args[0].ref), own), dtype)
    elif name == "clone":
        _made(node, emitter.step("Identity", (args[0].ref,), name_of(args[0].dtype, name)), args[0].dtype)
    else:
        found = table().get(func)
        if found is None:
            refuse(name, args)
        _compute(node, emitter, found, func, args, kwargs)
    if torch.is_grad_enabled() is not session.with_gradients:  # under no_grad
        _detach(node, emitter, name)
    node.refs = session.count
    node.steps = tuple(emitter.steps)
    node.detached = name in FILLS or (bool(node.steps) and node.steps[-1].kind == "StopGradient")
    node.shares = func in (torch.detach, torch.Tensor.detach, spread_over)
    if node.ref is not None:
        node.call = torch_call(session, node.ref, func, args, kwargs)
    session.node.after[key] = node
    return session.replay(node, func, args, kwargs)


def _runs(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call runs in torch, on an argument: its result has the same elements, as a view or a copy.

    Raises:
        Unimplemented: the call requests a memory format of anything else.
    """
    given = kwargs.get("memory_format") not in (None, torch.preserve_format)
    x = args[0] if args else None
    same = is_view(name) or name == "contiguous" or (name == "to" and given and len(args) == len(kwargs) == 1)
    if same and isinstance(x, Proxy) and all(p.actual is not None for p in proxies((*args, *kwargs.values()))):
        return True
    if given and name != "contiguous":
        raise trace_errors.unknown(
            name, "its result has a layout in memory of its own", "call it outside: on the result"
        )
    return False


def _made(node: Node, ref: Any, dtype: torch.dtype) -> None:
    node.action, node.ref, node.dtype = MAKES, ref, dtype


def _detach(node: Node, emitter: Emitter, name: str) -> None:
    if node.action == CHANGES:
        raise trace_errors.unknown(
            name, "under no_grad it changes a value that has gradients", "compute a new value: y = x * 2"
        )
    if node.action == MAKES and node.dtype is not None and node.dtype.is_floating_point:
        assert node.ref is not None
        node.ref = emitter.step("StopGradient", (node.ref,), name_of(node.dtype, name))


def _spread(node: Node, emitter: Emitter, value: Proxy, like: torch.Tensor) -> None:
    own = name_of(value.dtype, "expand")
    _made(node, emitter.step("BroadcastTo", (value.ref, emitter.session.capture(like)), own), value.dtype)


def _compute(
    node: Node,
    emitter: Emitter,
    found: Found,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    name = emitter.what
    bound = found.bind(args, kwargs)
    changes = found.inplace or bool(bound.get("inplace"))
    plain = {k: v for k, v in kwargs.items() if k != "inplace"}
    positional = args[: [n for n, _ in found.parameters].index("inplace")] if "inplace" in bound else args
    _check_devices(emitter.session, name, bound)
    on_host = emitter.session.device.type == "cpu"
    result = outcome(found.functional, positional, plain, on_host=on_host)
    if not isinstance(result, torch.Tensor):  # values and indices
        raise found.other_overload()
    ref = emitter.call(found, bound, result.dtype, compute_dtype(result, bound))
    if not changes:
        _made(node, ref, result.dtype)
        return
    target = args[0]
    if not isinstance(target, Proxy):
        raise trace_errors.writes(name, "a tensor that the function did not make")
    if target.actual is not None:
        raise trace_errors.writes(name, "an argument of the fused function")
    if target.shared:
        raise trace_errors.writes(name, "the memory of two values, by detach() or expand()")
    emitter.session.check_kept_shape(target, (*args[1:], *kwargs.values()))
    outcome(func, args, kwargs, on_host=on_host)  # torch raises if it cannot write one dtype into the other
    if result.dtype is not target.dtype:
        ref = emitter.cast(ref, name_of(target.dtype, name))
    node.action, node.ref, node.dtype = CHANGES, ref, target.dtype


def _check_devices(session: Session, name: str, bound: dict[str, Any]) -> None:
    for value in bound.values():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != session.device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {name} of {session.device} and {value.device} "
                f"({trace_errors.place()})"
            )


#: Functions that read the values of data into Python.
_READS = frozenset(
    (
        "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "item", "tolist", "numpy",
        "is_nonzero", "equal", "allclose", "nonzero", "unique", "__contains__", "data_ptr", "__format__",
    )
)  # fmt: skip
_REDUCES = frozenset(
    (
        "sum", "mean", "prod", "amax", "amin", "aminmax", "max", "min", "any", "all", "argmax", "argmin", "norm", "var",
        "std", "var_mean", "std_mean", "logsumexp", "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "sort",
        "median", "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "normalize", "nansum",
        "nanmean", "count_nonzero", "topk", "kthvalue", "vector_norm",
    )
)  # fmt: skip
_PRODUCTS = frozenset(
    (
        "matmul", "mm", "bmm", "linear", "conv1d", "conv2d", "conv3d", "einsum", "dot", "addmm", "baddbmm",
        "__matmul__", "__rmatmul__", "bilinear", "outer", "mv", "tensordot", "embedding",
        "scaled_dot_product_attention",
    )
)  # fmt: skip
_GRADIENTS = frozenset(
    ("grad", "grad_fn", "requires_grad_", "backward", "register_hook", "retain_grad", "is_leaf", "_version", "_grad")
)


def refuse(name: str, args: tuple[Any, ...]) -> NoReturn:
    """Raises the error for a function that opgraph does not fuse.

    Raises:
        InvalidArguments: the function needs the values of data.
        Unimplemented: everything else.
    """
    outside = trace_errors.OUTSIDE
    if name in _READS:
        raise trace_errors.branch_on_data(name)
    if name in _REDUCES:
        raise trace_errors.unknown(name, "a reduction over data is no pointwise function", outside)
    if name in _PRODUCTS:
        raise trace_errors.unknown(name, "it is no pointwise function; a library runs it better", outside)
    if draws(name):
        raise trace_errors.random(name)
    if name in _GRADIENTS:
        raise trace_errors.unknown(
            name, "inside, no tensor has a gradient yet", "use it on the arguments or on the result"
        )
    if name in LAYOUT:
        raise trace_errors.unknown(name, "where a computed value will lie in memory is not known", "ask the arguments")
    if name == "__setitem__":
        raise trace_errors.unknown(
            "x[...] = y", "it writes into a part of a tensor", "use torch.where(condition, y, x)"
        )
    if is_view(name) and args and isinstance(args[0], Proxy):
        raise trace_errors.view(name)
    raise trace_errors.unknown(name, "opgraph knows no op for it", outside)
