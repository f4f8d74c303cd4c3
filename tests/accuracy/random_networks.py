"""Random networks, fused and in eager torch: `python tests/accuracy/random_networks.py --seeds 0:200`.

A seed is a module: parameters, buffers, and a forward of random lines, each of which ran in eager torch when it was
drawn. Library calls, views, casts, writes in place, random numbers, branches on `training` and checkpoints stand among
pointwise ops, reductions and norms. Results, gradients, buffers, written inputs, strides, shared memory and random
numbers of the fused module are compared with those of the same module in eager torch, in f64: for two batch sizes, in
training and without gradients, and with two forwards before the backwards. Lines that a problem does not need are left
out of what is printed.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import opgraph.torch as ogt
from opgraph.runtime import host

#: Lines for values of any shape; "a" and "b" are values, "s" a number.
_POINTWISE = (
    "torch.sigmoid(a)", "torch.tanh(a)", "F.relu(a)", "F.silu(a)", "F.gelu(a)", "F.gelu(a, approximate='tanh')",
    "torch.exp(-a.abs())", "F.softplus(a)", "a.abs()", "-a", "torch.sin(a)", "a.cos()", "(a.abs() + 1).sqrt()",
    "(a * a + 1).rsqrt()", "torch.log1p(a.abs())", "torch.erf(a)", "F.hardswish(a)", "F.leaky_relu(a, 0.1)",
    "F.elu(a)", "a.clamp(-1, 1.5)", "a.square()", "1 / (1 + a.abs())", "F.mish(a)", "a * s", "a + s", "s - a",
    "a ** 2", "a.sign() * a", "a.detach() * a", "torch.where(a > s, a, s * a)", "a.masked_fill(a > 1, 0.5)",
    "(a > 0).to(a.dtype)", "(a > 0) * a", "a.clone()", "a.contiguous()", "a.detach()", "a.nan_to_num()",
    "a.floor() + a", "torch.logaddexp(a, torch.zeros_like(a))", "a.float().to(a.dtype)", "a % 0.7",
    "F.dropout(a, 0.3, self.training)", "a * torch.rand_like(a)", "a + a.new_ones(a.shape[-1:])",
    "torch.ones_like(a) * a", "F.hardtanh(a)", "a.tanh() if self.training else a * 2", "torch.lerp(a, a * s, 0.3)",
)  # fmt: skip
_BINARY = (
    "a + b", "a - b", "a * b", "a / (b.abs() + 1)", "torch.maximum(a, b)", "torch.minimum(a, b)",
    "torch.where(a > b, a, b)", "torch.addcmul(a, a, b, value=s)", "torch.lerp(a, b, 0.25)", "torch.hypot(a, b)",
    "torch.atan2(a, b)", "a * torch.sigmoid(b)", "F.silu(a) * b", "torch.add(a, b, alpha=s)", "(a < b).to(a.dtype)",
    "a.addcdiv(a, b.abs() + 1)",
)  # fmt: skip
#: Lines for an axis d of a; n is its length.
_AXIS = (
    "a.sum(d)", "a.mean(d)", "a.sum(d, keepdim=True)", "a.mean(d, keepdim=True)", "a.amax(d, keepdim=True)",
    "a.amin(d)", "a.var(d, keepdim=True)", "a.std(d, unbiased=False)", "a.logsumexp(d)", "torch.softmax(a, d)",
    "F.log_softmax(a, d)", "a.cumsum(d)", "F.normalize(a, dim=d)", "a - a.mean(d, keepdim=True)",
    "a / (a.abs().amax(d, keepdim=True) + 1)", "a.norm(dim=d, keepdim=True)", "a.prod(d)", "a.max(d)[0]",
    "a.topk(1, d)[0]", "a.sort(d)[0]", "a.flip(d)", "a.roll(1, d)", "a.unbind(d)[0]", "a.unbind(d)[-1]",
    "a.select(d, 0)", "a.narrow(d, 0, n // 2)", "a.narrow(d, n // 2, n - n // 2)", "a.unsqueeze(d)", "a.squeeze(d)",
    "torch.cat((a, a * s), d)", "torch.cat((a.narrow(d, n // 2, n - n // 2), a.narrow(d, 0, n // 2)), d)",
    "torch.stack((a, -a), d)", "a.chunk(2, d)[0]", "a.chunk(2, d)[-1]", "a.repeat_interleave(2, d)",
    "torch.cat((a, a.detach()), d)", "a.transpose(d, 0)", "a.transpose(d, -1)", "a.movedim(d, 0)",
    "a.index_select(d, torch.arange(n - 1, -1, -1))", "a.unfold(d, 2, 1)", "a.unflatten(d, (n // 2, 2))",
    "torch.stack(a.unbind(d), d)", "a.split((1, n - 1), d)[1]", "a.gather(d, a.argsort(d))",
    "a.std(d, keepdim=True) * a", "F.glu(a, d)", "a.argmax(d).to(a.dtype)", "a.diff(dim=d)",
)  # fmt: skip
_WHOLE = (
    "a.sum()", "a.mean()", "a * a.mean()", "a / (1 + a.abs().max())", "a.flatten()", "a.flatten(1)",
    "a.reshape(a.shape[0], -1)", "a.t() if a.dim() == 2 else a.transpose(-1, -2)",
    "a.permute(*reversed(range(a.dim())))", "a[..., ::2]", "a[:, 1:]", "a[1:]", "a[..., :-1]", "a[None]",
    "a.expand(2, *a.shape)", "a.tril()", "a.triu(1)", "F.pad(a, (1, 1))", "F.pad(a, (0, 1), value=s)",
    "a.view(a.shape)", "a.repeat(*(1,) * (a.dim() - 1), 2)", "a.diagonal(0, -2, -1)", "F.layer_norm(a, a.shape[-1:])",
    "F.rms_norm(a, a.shape[-1:])", "a @ a.transpose(-1, -2)", "a.std() * a",
    "torch.einsum('...ij,...kj->...ik', a, a)", "a.softmax(-1) @ a.transpose(-1, -2)",
    "a.as_strided(a.shape, a.stride())", "a.reshape(-1, a.shape[-1])", "a.view(-1)", "a.mT.contiguous()",
    "a[..., None] * a[..., None, :]", "a[a.dim() * [0]]", "F.scaled_dot_product_attention(a, a, a)",
    "a.clone(memory_format=torch.preserve_format)", "a.new_zeros(a.shape) + a",
)  # fmt: skip
#: For images (B, C, H, W). In torch 2.13 backward of group_norm crashes where H and W are turned.
_IMAGE = (
    "F.max_pool2d(a, 2)", "F.avg_pool2d(a, 2)", "F.adaptive_avg_pool2d(a, 1)", "F.interpolate(a, scale_factor=2)",
    "F.interpolate(a, scale_factor=2, mode='bilinear')", "a.mean((2, 3))", "a.sum((0, 2, 3))",
    "a.amax((2, 3), keepdim=True)", "a.contiguous(memory_format=torch.channels_last)",
    "F.group_norm(a.contiguous(), 1)",
    "F.instance_norm(a)", "a.permute(0, 2, 3, 1)", "a * a.mean((2, 3), keepdim=True).sigmoid()",
    "F.pixel_unshuffle(a, 2)", "a.var((0, 2, 3), keepdim=True) + a", "F.pad(a, (1, 0, 0, 1))",
    "a.flatten(2).transpose(1, 2)", "F.max_pool2d(a, 3, 1, 1)",
)  # fmt: skip
#: Modules, by what they are made of for a value with c at axis 1 or n at the end.
_LAYERS_IMAGE = (
    "nn.Conv2d({c}, 4, 3, padding=1)", "nn.Conv2d({c}, 6, 1)", "nn.Conv2d({c}, 4, 3, 2, 1, bias=False)",
    "nn.Conv2d({c}, {c}, 3, padding=1, groups={c})", "nn.ConvTranspose2d({c}, 4, 2, 2)", "nn.BatchNorm2d({c})",
    "nn.BatchNorm2d({c}, affine=False)", "nn.BatchNorm2d({c}, track_running_stats=False)",
    "nn.PReLU({c})", "nn.Sequential(nn.Conv2d({c}, 8, 1), nn.BatchNorm2d(8), nn.SiLU(inplace=True))",
    "nn.Conv2d({c}, {c}, 3, padding=2, dilation=2)", "nn.Dropout2d(0.2)", "nn.Conv2d({c}, {c}, 1, 2)",
)  # fmt: skip
_LAYERS = (
    "nn.Linear({n}, 5)", "nn.Linear({n}, {n}, bias=False)", "nn.LayerNorm({n})", "nn.RMSNorm({n})", "nn.PReLU()",
    "nn.Sequential(nn.Linear({n}, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, {n}))", "nn.Dropout(0.4)",
)  # fmt: skip
#: Statements that write; "a" is a value, its writes may be refused by eager torch's backward.
_WRITES = (
    "a.mul_(s)", "a.add_(1)", "a[..., 0] = s", "a[:, :1].mul_(2)", "a.relu_()", "a.masked_fill_(a > s, 0.25)",
    "a.zero_()", "a[0].add_(a[-1].detach())", "a.copy_(a.flip(0))", "a.clamp_(-1, 1)", "a += 1", "a *= s",
    "a.sigmoid_()", "F.silu(a, inplace=True)", "self.scale.add_(a.detach().mean())", "self.steps += 1",
    "self.scale = self.scale * 0.5 + a.detach().mean()", "self.scale.copy_(a.detach().amax())", "a.t_()",
    "a.unsqueeze_(0)", "a.transpose_(0, -1)", "a.sub_(a.detach().mean())", "a.index_fill_(0, torch.tensor([0]), s)",
    "a.select(-1, 0).fill_(s)", "a.view(-1)[:2].mul_(3)", "a[a > 1] = 0.5",
)  # fmt: skip
_OTHERS = (
    "a * self.weight", "a * self.scale", "a + self.steps",
    "checkpoint(lambda t: torch.sigmoid(t) * t, a, use_reentrant=False)",
)  # fmt: skip
#: Of a value; larger ones are left out.
_MOST_ELEMENTS = 6000
#: Seconds between two lines that say how far a run is.
_EVERY = 60.0


@dataclass
class Text:
    """What a network is made of.

    Attributes:
        image: whether its inputs `x` and `y` are images.
        lines: of its forward.
        layers: name -> a module, as text.
        outputs: names of what it returns.
    """

    image: bool
    lines: list[str] = field(default_factory=list)
    layers: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=lambda: ["x"])

    def __str__(self) -> str:
        lines = "".join(f"    {line}\n" for line in [*self.lines, f"return ({', '.join(self.outputs)},)"])
        return f"def forward(self, x, y):\n{lines}"


class Network(nn.Module):
    """A module.

    Args:
        text: of its forward.
        seed: of its parameters.
    """

    def __init__(self, text: Text, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale: torch.Tensor
        self.steps: torch.Tensor
        self.register_buffer("scale", torch.tensor([0.7]))
        self.register_buffer("steps", torch.tensor(0))
        self.weight = nn.Parameter(torch.tensor(0.8))
        for name, layer in text.layers.items():
            setattr(self, name, eval(layer))
        self.double()
        names: dict[str, Any] = dict(_NAMES)
        exec(compile(str(text), f"<network {seed}>", "exec"), names)
        self._forward = names["forward"]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self._forward(self, x, y)


_NAMES = {"torch": torch, "F": functional, "nn": nn, "checkpoint": checkpoint}


def inputs(seed: int, batch: int, image: bool) -> list[torch.Tensor]:
    """Two inputs; of images the first may lie channels last."""
    source = torch.Generator().manual_seed(seed + batch)
    shape = (batch, 4, 6, 6) if image else (batch, 6, 8)
    made = [torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(2)]
    if image and seed % 3 == 0:
        made[0] = made[0].contiguous(memory_format=torch.channels_last)
    elif seed % 5 == 1:
        made[0] = made[0].transpose(-1, -2).contiguous().transpose(-1, -2)
    return made


def drawn(seed: int, longest: int = 24) -> Text:
    """The network of a seed."""
    rng = random.Random(seed)
    text = Text(image=rng.random() < 0.5)
    model = Network(text, seed)
    values: dict[str, Any] = dict(zip("xy", inputs(seed, 3, text.image), strict=True))
    for _ in range(rng.randint(3, longest)):
        line = _line(rng, values, model, text)
        if line is not None:
            text.lines.append(line)
    names = [n for n in values if n not in "xy"] or ["x"]
    unread = [n for n in names if not re.search(rf"\b{n}\b(?! =)", " ".join(text.lines))]
    more = rng.sample(names, min(len(names), rng.choice((0, 0, 1, 2))))
    text.outputs = list(dict.fromkeys([names[-1], *unread[-3:], *more]))
    if rng.random() < 0.1:
        text.outputs.append(rng.choice(("x", "y", "x[:, 0]")))
    return text


def _line(rng: random.Random, values: dict[str, Any], model: Network, network: Text) -> str | None:
    """One more line, which has run on the values; None where it did not."""
    names, number = list(values), len(network.lines)
    a = names[-1] if rng.random() < 0.5 else rng.choice(names[-4:]) if rng.random() < 0.7 else rng.choice(names)
    value = values[a]
    kind = rng.random()
    target = f"v{number}"
    if kind < 0.25:
        text = rng.choice(_POINTWISE)
    elif kind < 0.42:
        text = rng.choice(_BINARY)
    elif kind < 0.60:
        text = rng.choice(_AXIS)
    elif kind < 0.72:
        text = rng.choice(_WHOLE if value.dim() != 4 or rng.random() < 0.5 else _IMAGE)
    elif kind < 0.86:
        choices = _LAYERS_IMAGE if value.dim() == 4 and rng.random() < 0.8 else _LAYERS
        layer = rng.choice(choices).format(
            c=value.shape[1] if value.dim() > 1 else 1, n=value.shape[-1] if value.dim() else 1
        )
        name = f"layer{number}"
        try:
            torch.manual_seed(number)
            setattr(model, name, eval(layer).double())
        except (ValueError, RuntimeError):
            return None
        network.layers[name] = layer
        text = f"self.{name}(a)"
    elif kind < 0.95:
        text, target = rng.choice(_WRITES), ""
    else:
        text = rng.choice(_OTHERS)
    axis = rng.randrange(value.dim()) if value.dim() else 0
    near = [n for n in names if values[n].shape == value.shape]
    b = rng.choice(near if rng.random() < 0.7 else names)
    axis_text = str(axis if rng.random() < 0.5 or not value.dim() else axis - value.dim())
    words = {
        "a": a,
        "b": b,
        "s": repr(rng.choice((0.5, -0.3, 2.0, 1.5))),
        "d": axis_text,
        "n": f"{a}.shape[{axis_text}]",
    }
    text = _with_words(text, words)
    line = f"{target} = {text}" if target else text
    copies = {n: v.clone() for n, v in values.items()}  # after a write that raised, or made NaN
    local = {**_NAMES, "self": model, **values}
    try:
        with torch.no_grad():
            exec(line, local)
        found = local[target or a]
        if not 0 < found.numel() <= _MOST_ELEMENTS or not bool((found.abs() < 1e4).all()):
            raise ValueError("no value for further lines")
    except Exception:
        values.update(copies)
        return None
    if target:
        values[target] = found
    return line


def _with_words(text: str, words: dict[str, str]) -> str:
    """A template with words in place of its letters."""
    return re.sub(r"(?<![\w.'])([absdn])(?![\w'(])(?!=)", lambda found: words[found[1]], text)


def run(model: Any, given: list[torch.Tensor], seed: int, *, grads: bool, twice: bool = False) -> dict[str, Any]:
    """What a call does: results, gradients, buffers, written inputs, random numbers."""
    torch.manual_seed(seed)
    tensors = [
        t.clone(memory_format=torch.preserve_format).requires_grad_(grads and i == 0) for i, t in enumerate(given)
    ]
    called = [t * 1 if t.requires_grad else t for t in tensors]  # what is written is no leaf
    with torch.set_grad_enabled(grads):
        results = model(*called)
        more = model(*[t.detach().clone() for t in given]) if twice else ()
    found: dict[str, Any] = {}
    for i, result in enumerate(results):
        found[f"result {i}"] = result.detach().clone()
        found[f"strides {i}"] = _strides(result)
        found[f"requires_grad {i}"] = result.requires_grad
        found[f"shares {i}"] = [_shares(result, t) for t in called]
    for i, t in enumerate(called):
        found[f"input {i}"] = t.detach().clone()
    if grads:
        for kind, outputs in (("", results), ("second ", more)):
            model.zero_grad()
            differentiable = [r for r in outputs if r.requires_grad]
            if differentiable:
                cotangents = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape) for r in differentiable]
                torch.autograd.backward(differentiable, cotangents)
                for name, p in model.named_parameters():
                    found[f"{kind}gradient of {name}"] = None if p.grad is None else p.grad.clone()
                if not kind:
                    found["gradient of x"] = None if tensors[0].grad is None else tensors[0].grad.clone()
    for name, value in model.named_buffers():
        found[f"buffer {name}"] = value.clone()
    found["random numbers"] = torch.rand(2)
    return found


def _strides(result: torch.Tensor) -> tuple[int, ...] | None:
    """Those of axes longer than 1; None of a view that does not fill its memory: a fused model may return a copy."""
    found = sorted((s, n) for s, n in zip(result.stride(), result.shape, strict=True) if n > 1)
    is_dense = all(s == (found[i - 1][0] * found[i - 1][1] if i else 1) for i, (s, _) in enumerate(found))
    return tuple(s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1) if is_dense else None


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def problems(text: Text, seed: int) -> Iterator[str]:
    """What is not as in eager torch; nothing where eager torch itself raises an error."""
    torch._dynamo.reset()
    eager = Network(text, seed)
    fused = ogt.fuse(copy.deepcopy(eager))
    for batch, training, grads, twice in (
        (3, True, True, False),
        (3, False, False, False),
        (5, True, True, True),
        (2, False, True, False),
    ):
        given = inputs(seed, batch, text.image)
        case = f"batch {batch}, {'training' if training else 'eval'}, {'gradients' if grads else 'none'}"
        try:
            expected = run(eager.train(training), given, seed, grads=grads, twice=twice)
        except Exception:
            fused.load_state_dict(eager.state_dict())
            continue
        try:
            got = run(fused.train(training), given, seed, grads=grads, twice=twice)
        except Exception as error:
            yield f"{case}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return
        wrong = [f"{case}: {name}: {why}" for name in expected if (why := _differs(got.get(name), expected[name]))]
        yield from wrong
        if wrong:
            return


def _differs(got: Any, expected: Any) -> str:
    if expected is None and isinstance(got, tuple):
        return ""  # strides of what eager torch returns as a view
    if isinstance(expected, list):  # torch.compile returns a copy where F.dropout gives back its argument
        more = any(ours and not theirs for ours, theirs in zip(got, expected, strict=True))
        return "it lies in memory that it has of its own in eager torch" if more else ""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if type(got) is type(expected) and got == expected:
            return ""
        return " is not ".join("a tensor" if isinstance(v, torch.Tensor) else str(v) for v in (got, expected))
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype}{list(got.shape)} is not {expected.dtype}{list(expected.shape)}"
    size = expected.abs().nan_to_num().max().item() if expected.numel() else 0
    try:
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7 * max(1.0, size), equal_nan=True)
    except AssertionError as error:
        return str(error).replace("\n", " ")[:160]
    return ""


def shrunk(text: Text, seed: int) -> Text:
    """The outputs and lines that a problem needs."""

    def shows(smaller: Text) -> bool:
        try:
            return next(problems(smaller, seed), None) is not None
        except Exception:
            return False  # a line reads what an earlier one made

    for name in text.outputs:
        smaller = replace(text, outputs=[n for n in text.outputs if n != name])
        if smaller.outputs and shows(smaller):
            text = smaller
    for line in reversed(text.lines):
        smaller = replace(text, lines=[other for other in text.lines if other is not line])
        if shows(smaller):
            text = smaller
    return text


def main() -> int:
    """The command; its exit status is 1 where a seed showed a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", metavar="A:B", help="from A up to, but not, B; A: without an end")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stops after so long")
    parser.add_argument("--no-compiler", action="store_true", help="kernels run op by op")
    given = parser.parse_args()
    if given.no_compiler:
        host.find_compiler = lambda: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    begin, _, end = given.seeds.partition(":")
    first, last = int(begin), int(end or sys.maxsize)
    warnings.simplefilter("ignore")
    start, ran, wrong = time.monotonic(), 0, 0
    told_at = start
    for seed in range(first, last):
        now = time.monotonic()
        if now > start + 60 * given.minutes:
            break
        if now > told_at + _EVERY:
            told_at = now
            print(f"{ran} networks in {now - start:.0f} s, {wrong} with problems; next: --seeds {seed}:", flush=True)
        ran += 1
        text = drawn(seed)
        if next(problems(text, seed), None) is not None:
            wrong += 1
            text = shrunk(text, seed)
            print(f"seed {seed}:", *problems(text, seed), sep="\n  ")
            layers = {name: layer for name, layer in text.layers.items() if f"self.{name}(" in str(text)}
            print(text, layers, flush=True)
    print(f"{ran} networks from seed {first} in {time.monotonic() - start:.0f} s: {wrong} with problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
