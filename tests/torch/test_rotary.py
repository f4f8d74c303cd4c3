"""Joins inside kernels: rotary embedding, cat of equal parts, slice_scatter, pad, and slices of computed values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

from opgraph.torch.dynamo import backend  # noqa: E402
from opgraph.torch.graph.axis_splits import AxisSplit  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 16
STRIDED = {
    "contiguous": lambda x: x.contiguous(),
    "heads transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a product": lambda x: torch.cat((x, x + 1), -1)[..., WIDTH:],
    "every other": lambda x: torch.stack((x, x), -1)[..., 0],
}


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch._dynamo.reset()
    torch.manual_seed(0)


def rotated(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotary(q, k, cos, sin):
    return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin


def heads(dtype=torch.float32, width=WIDTH, count=HEADS):
    return torch.randn(BATCH, count, LENGTH, width, dtype=dtype)


def table(dtype=torch.float32, width=WIDTH):
    return torch.randn(1, 1, LENGTH, width, dtype=dtype)


def results(function, given, learned):
    """The results of a function, and its gradients."""
    given = [x.detach().requires_grad_(i in learned) for i, x in enumerate(given)]
    made = function(*given)
    made = made if isinstance(made, tuple) else (made,)
    torch.manual_seed(1)
    weights = [torch.randn_like(y) for y in made]
    return (*made, *torch.autograd.grad(made, [given[i] for i in learned], weights))


def compared(function, *given, learned=None, rounding="store", exactly=False):
    """Kernels and library calls, forward and backward, of a function; checks that its results are eager torch's."""
    captured = []
    learned = range(len(given)) if learned is None else learned
    compiled = torch.compile(function, backend=backend, fullgraph=True, options={"rounding": rounding})
    with observed(captured.append):
        found = results(compiled, given, learned)
    wanted = results(function, given, learned)
    for y, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(y, expected, **({"rtol": 0, "atol": 0} if exactly else {}))
        assert y.stride() == expected.stride()
    ways = [g.forward for g in captured], [g.backward for g in captured]
    return [
        (
            sum(len(p.launches) for p in programs),
            [str(n.target).split(".")[1] for p in programs for n in p.library_calls],
        )
        for programs in ways
    ]


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        *((torch.float32, layout) for layout in STRIDED),
        (torch.bfloat16, "heads transposed"),
        (torch.float64, "contiguous"),
    ],
    ids=str,
)
def test_rotary_embedding_is_one_forward_and_one_backward_kernel(dtype, layout):
    q, k = STRIDED[layout](heads(dtype)), STRIDED[layout](heads(dtype))
    counts = compared(rotary, q, k, table(dtype), table(dtype), learned=(0, 1), rounding="each", exactly=True)
    assert all(kernels <= 2 and not calls for kernels, calls in counts)  # one for q, one for k


def test_llama_has_no_cat_left_outside_kernels():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    model, captured = transformers.LlamaForCausalLM(config), []
    tokens = torch.randint(0, 50, (2, 8))
    with observed(captured.append):
        found = torch.compile(model, backend=backend)(tokens).logits
    found.square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    wanted = model(tokens).logits
    wanted.square().mean().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grads, [p.grad for p in model.parameters()])
    for program in (captured[0].forward, captured[0].backward):
        called = {str(n.target) for n in program.library_calls}
        assert not any(name in call for call in called for name in ("cat", "slice", "pad", "full")), called
        # Each layer has one kernel for q and one for k, which has fewer heads here.
        joins = [x for x in program.launches if "GenIndex" in str(x.kernel.lowered.loop)]
        assert len(joins) == 2 * config.num_hidden_layers


@pytest.mark.parametrize(
    "function",
    [
        lambda x, c: torch.cat((x * c, x.exp()), 1) * c,  # along heads
        lambda x, c: torch.cat((x * 2, x, c.expand_as(x)), -1).sin(),  # three parts, one of them broadcast
        lambda x, c: torch.cat((c, c), -1).cos() * torch.cat((x, x * 2), -1),  # one part twice
        lambda x, c: F.pad(x * c, (0, WIDTH), value=2.5) * torch.cat((c, c), -1),
        lambda x, c: torch.slice_scatter(x.sin(), (x * c)[..., :4], -1, 8, 12) * c,  # into a computed value
        lambda x, c: rotated(x) * (rotated(x) * c).mean(-1, keepdim=True),  # rows over the joined axis
        lambda x, c: rotated(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * c) * c,
        lambda x, c: (rotated(x) * c).sum(-1) + 1,  # a reduction without its axes
        lambda x, c: rotated(torch.tanh(x) * c) * c + torch.tanh(x),  # slices of a value that is also read whole
    ],
)
def test_all_kinds_of_cat_and_slice_run_in_kernels(function):
    for _, calls in compared(function, heads(), table()):
        assert calls == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x, c: torch.cat((x[..., :4] * 2, x[..., 4:]), -1) * c,  # parts of two sizes
        lambda x, c: torch.cat([x * i + c for i in range(1, 7)], -1).sin(),  # more parts than a kernel recomputes
        lambda x, c: torch.cat((x[..., :1] * 2, x[..., 1:2]), -1) * c[..., :2],  # blocks of one element
        lambda x, c: torch.cat((x * c, x), 1) * c + rotated(torch.cat((x, x + 1), 1)) * c,  # along two axes
        lambda x, c: (torch.exp(x) * c).select(-2, 3) * 2 + (torch.exp(x) * c).select(-2, 0),
        lambda x, c: (x * c)[..., ::2] * (x * c)[..., 1::2],
        lambda x, c: torch.cat((x * c, x), -1) @ torch.cat((x, x), -1).transpose(-1, -2),
        lambda x, c: ((x * c)[..., :8] @ c.mT[..., :8, :]) * 2,  # a library call reads a slice
    ],
)
def test_unsupported_cats_run_in_torch(function):
    forward, backward = compared(function, heads(), table())
    assert forward[1] or backward[1]


def test_returned_cat_agrees_with_eager():
    def function(x, c):
        joined = rotated(x)
        return joined, joined * c, torch.cat((c, c), 0), x[..., :8] * 1

    compared(function, heads(), table())


def test_axis_split_views_the_same_memory():
    split = AxisSplit(-2, 6, 3)
    x = torch.randn(4, 6, 5).transpose(0, 2)
    seen = x.as_strided(split.shape(x.shape), split.strides(x.shape, x.stride()))
    assert seen.shape == (5, 3, 2, 4)
    torch.testing.assert_close(seen.reshape(x.shape), x, rtol=0, atol=0)
    assert (split.shape((6,)), split.shape((1, 4)), split.shape((2, 4))) == ((6,), (1, 1, 4), (1, 2, 4))
    assert (split.axes(3, [0]), split.axes(3, [1, 2]), split.axes(2, [0])) == ([0], [1, 2, 3], [0, 1])
