"""torch's own function for a formula, if there is one: into given arrays where torch supports that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opgraph.bench.case import Case
from opgraph.bench.entries import EPSILON
from opgraph.bench.peers.peer import Built, Peer, Refused
from opgraph.bench.peers.torch_tensors import by_autograd, find_torch, tensor, tensors

Maker = Callable[[Case], Built]


def _one(name: str, out: str = "grad_input", **attrs: str) -> tuple[Maker, Maker]:
    """An elementwise function of one tensor: `aten.<name>.out`, and its backward likewise."""

    def forward(case: Case) -> Built:
        import torch

        (x,), y = tensors(case), tensor(case.out)
        function = getattr(torch.ops.aten, name).out
        return Built(call=lambda: function(x, **attrs, out=y))

    def backward(case: Case) -> Built:
        import torch

        (x,), d_y, d_x = tensors(case), tensor(case.arrays["d_y"]), tensor(case.out)
        function = getattr(torch.ops.aten, f"{name}_backward")
        if not out:  # torch has no variant of it with an output argument
            return Built(call=lambda: function.default(d_y, x, **attrs), returns=("d_x",))
        into = getattr(function, out)
        return Built(call=lambda: into(d_y, x, **attrs, **{out: d_x}))

    return forward, backward


def _function(function: Callable[[Any], Callable[..., Any]]) -> tuple[Maker, Maker]:
    """Functions of torch.nn.functional in sequence; backward by autograd."""

    def forward(case: Case) -> Built:
        from torch.nn import functional

        apply, xs = function(functional), tensors(case)
        if case.entry.in_place:
            return Built(call=lambda: apply(*xs))
        return Built(call=lambda: apply(*xs), returns=("y",))

    def backward(case: Case) -> Built:
        from torch.nn import functional

        return by_autograd(case, function(functional))

    return forward, backward


def _glu(case: Case) -> Built:
    import torch

    x, y = tensor(case.packed), tensor(case.out)
    return Built(call=lambda: torch.ops.aten.glu.out(x, -1, out=y))


def _glu_backward(case: Case) -> Built:
    import torch

    x, d_y, d_x = (tensor(a) for a in (case.packed, case.arrays["d_y"], case.packed_out))
    return Built(call=lambda: torch.ops.aten.glu_backward.grad_input(d_y, x, -1, grad_input=d_x))


def _softmax(case: Case) -> Built:
    import torch

    (x,), y = tensors(case), tensor(case.out)
    return Built(call=lambda: torch.ops.aten._softmax.out(x, -1, False, out=y))


def _softmax_backward(case: Case) -> Built:
    import torch

    (x,), d_y, d_x = tensors(case), tensor(case.arrays["d_y"]), tensor(case.out)
    y = torch.softmax(x, -1)
    into = torch.ops.aten._softmax_backward_data.out
    return Built(call=lambda: into(d_y, y, -1, x.dtype, grad_input=d_x), note="given the forward's result")


def _layer_norm(case: Case) -> Built:
    import torch

    (x, w, b), y = tensors(case), tensor(case.out)
    _, mean, scale = torch.ops.aten.native_layer_norm(x, x.shape[-1:], w, b, EPSILON)
    into = torch.ops.aten.native_layer_norm.out
    return Built(call=lambda: into(x, x.shape[-1:], w, b, EPSILON, out0=y, out1=mean, out2=scale))


def _layer_norm_backward(case: Case) -> Built:
    import torch

    (x, w, b), d_y = tensors(case), tensor(case.arrays["d_y"])
    _, mean, scale = torch.ops.aten.native_layer_norm(x, x.shape[-1:], w, b, EPSILON)
    function = torch.ops.aten.native_layer_norm_backward.default
    return Built(
        call=lambda: function(d_y, x, x.shape[-1:], mean, scale, w, b, [True, True, True]),
        returns=("d_x", "d_w", "d_b"),
        note="given mean and deviation",
    )


#: Entry.native -> forward, backward.
NATIVE: Mapping[str, tuple[Maker, Maker]] = {
    "silu": _one("silu"),
    "gelu": _one("gelu"),
    "gelu_tanh": _one("gelu", approximate="tanh"),
    "mish": _one("mish", out=""),
    "hardswish": _one("hardswish", out="out"),
    "glu": (_glu, _glu_backward),
    "softmax": (_softmax, _softmax_backward),
    "layer_norm": (_layer_norm, _layer_norm_backward),
    "rms_norm": _function(lambda f: lambda x, w: f.rms_norm(x, x.shape[-1:], w, EPSILON)),
    "silu_mul": _function(lambda f: lambda gate, up: f.silu(gate) * up),
    "silu_add": _function(lambda f: lambda x, r: f.silu(x) + r),
    "add_gelu": _function(lambda f: lambda x, b: f.gelu(x + b, approximate="tanh")),
    "silu_add_clamp_": _function(lambda f: lambda x, r: f.silu(x, inplace=True).add_(r).clamp_(-6, 6)),
    "layer_norm_gelu": _function(
        lambda f: lambda x, w, b: f.gelu(f.layer_norm(x, x.shape[-1:], w, b, EPSILON), approximate="tanh")
    ),
}


def _build(case: Case) -> Built:
    found = NATIVE.get(case.entry.native)
    if found is None:
        raise Refused("torch has no function of its own for it")
    return found[case.is_backward](case)


PEER = Peer(name="torch native", get="pip install torch", find=find_torch, build=_build)
