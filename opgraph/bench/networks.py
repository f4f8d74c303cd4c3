"""Networks that `opgraph bench --suite networks` runs, and the ways in which each runs.

Image networks are those of `opgraph.torch.zoo`; transformers come from the package of that name, with small
configurations and random weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import opgraph.torch as ogt
from opgraph.torch import zoo
from opgraph.torch.graph.torch_internals import backend_named, functorch_settings
from opgraph.torch.naf1 import NAF1

Feed = dict[str, torch.Tensor]

STEP, INFERENCE, MEMORY, FIRST = "training step", "inference", "memory", "first step"
STEP_BUDGETS, MEMORY_BUDGETS = "training step, budgets", "memory, budgets"
STEP_ALONE = "forward and backward"
#: The time in a training step to check that Python branches on parameters go the same way as before.
BRANCHES = "branches on parameters"

OURS, EAGER, COMPILED, CHECKPOINTED = "opgraph", "torch eager", "torch.compile", "torch.utils.checkpoint"
#: `ogt.fuse` with `memory="fast"`, which saves more for backward than `OURS`.
FAST = "opgraph, fast"
#: `ogt.fuse` of a module's forward, which is a function; `OURS` fuses the module.
FUNCTION = "opgraph, a function"
#: Memory budgets of ways, as a fraction of what torch's partitioner would save for backward.
BUDGETS = (0.5, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network with random weights, and its questions.

    Attributes:
        make: creates the model, in training mode.
        feed: a batch of inputs, by the names of forward's arguments; the batch size is `batch` in a timed step, and
            `counted` where memory is measured.
        blocks: classes of the modules that `torch.utils.checkpoint` wraps; empty: the whole model.
        questions: its rows.
        threads: None for as many as the run has.
        draws: forward draws random numbers, which torch.compile draws differently from eager torch.
        package: the package of the model, if that is not torch.
    """

    name: str
    make: Callable[[], nn.Module]
    feed: Callable[[int], Feed]
    batch: int = 1
    counted: int = 1
    blocks: tuple[str, ...] = ()
    questions: tuple[str, ...] = (STEP, INFERENCE, MEMORY, FIRST)
    threads: int | None = None
    draws: bool = False
    package: str = ""

    def ways(self, question: str) -> tuple[str, ...]:
        """The ways that are compared in one of its rows, opgraph first."""
        budgets = tuple(f"{way}, budget {b:g}" for b in BUDGETS for way in (OURS, COMPILED))
        return {
            STEP: (OURS, EAGER, COMPILED, CHECKPOINTED),
            STEP_ALONE: (OURS, FUNCTION, EAGER, COMPILED, CHECKPOINTED),
            INFERENCE: (OURS, EAGER, COMPILED),
            MEMORY: (OURS, EAGER, COMPILED, CHECKPOINTED),
            FIRST: (OURS, COMPILED),
            BRANCHES: (OURS,),
            STEP_BUDGETS: (OURS, EAGER, FAST, *budgets),
            MEMORY_BUDGETS: (FAST, *budgets),
        }[question]


class TrainedSwish(nn.Module):
    """x * sigmoid(a * x) with a trained factor, composed of torch ops."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same."""
        return x * torch.sigmoid(self.a * x)


class Mish(nn.Module):
    """Mish, composed of torch ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same."""
        return x * torch.tanh(nn.functional.softplus(x))


# -- ways -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a model; `apply` makes a model run in this way."""

    apply: Callable[[nn.Module, Network], Callable[..., Any]]


def _eager(model: nn.Module, network: Network) -> nn.Module:
    return model


def _function(model: nn.Module, network: Network) -> Callable[..., Any]:
    return ogt.fuse(model.forward)


def _checkpointed(model: nn.Module, network: Network) -> nn.Module:
    blocks = [m for m in model.modules() if type(m).__name__ in network.blocks] if network.blocks else [model]
    if not blocks:
        raise LookupError(f"{network.name} has no block of {', '.join(network.blocks)}")
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _compiled(model: nn.Module, network: Network, backend: Any = "inductor") -> nn.Module:
    compiled: Any = torch.compile(model, backend=backend)
    return compiled  # type: ignore[no-any-return]


def _compiled_within(part: float) -> Callable[[nn.Module, Network], nn.Module]:
    """torch.compile with a memory budget, through a separate backend.

    Copies of a model share what Dynamo compiled with one backend, so that a second budget would have no effect.
    """

    def apply(model: nn.Module, network: Network) -> nn.Module:
        inductor = backend_named("inductor")

        def backend(graph: Any, inputs: Any) -> Any:
            with functorch_settings(activation_memory_budget=part):
                return inductor(graph, inputs)

        return _compiled(model, network, backend)

    return apply


WAYS: Mapping[str, Way] = {
    OURS: Way(lambda model, _: ogt.fuse(model)),
    FAST: Way(lambda model, _: ogt.fuse(model, memory="fast")),
    FUNCTION: Way(_function),
    EAGER: Way(_eager),
    COMPILED: Way(_compiled),
    CHECKPOINTED: Way(_checkpointed),
    **{f"{OURS}, budget {b:g}": Way(lambda model, _, b=b: ogt.fuse(model, memory=b)) for b in BUDGETS},  # type: ignore[misc]
    **{f"{COMPILED}, budget {b:g}": Way(_compiled_within(b)) for b in BUDGETS},
}


# -- models ---------------------------------------------------------------------------------------------------------


def _images(count: int, size: int = 32, name: str = "x") -> Feed:
    return {name: torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))}


def _tokens(count: int, length: int) -> Feed:
    return {"input_ids": torch.randint(0, 250, (count, length), generator=torch.Generator().manual_seed(1))}


def _vector(count: int) -> Feed:
    return {"x": torch.randn(count * 1024, generator=torch.Generator().manual_seed(1)).requires_grad_()}


def _llama(hidden: int, intermediate: int, heads: int, vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=4, num_attention_heads=heads,
        vocab_size=vocabulary, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=512, n_layer=4, n_head=8, vocab_size=1000, n_positions=512, use_cache=False)
    return GPT2LMHeadModel(config).train()


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=3, image_size=64, patch_size=8,
    )  # fmt: skip
    return ViTForImageClassification(config).train()


def _convnext() -> Any:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(depths=[2, 2, 4, 2], hidden_sizes=[48, 96, 192, 384], image_size=64)
    return ConvNextForImageClassification(config).train()


def _on_images(name: str, make: Callable[[], nn.Module], *blocks: str, **more: Any) -> Network:
    return Network(name=name, make=make, feed=_images, batch=16, counted=128, blocks=blocks, **more)


_ALL = (STEP, INFERENCE, MEMORY, FIRST, STEP_BUDGETS, MEMORY_BUDGETS)
_LLAMA_BLOCKS, _PACKAGE = ("LlamaDecoderLayer",), "transformers"

NETWORKS: tuple[Network, ...] = (
    Network(name="x*sigmoid(a*x), 1,024 elements", make=TrainedSwish, feed=_vector, questions=(STEP_ALONE,), threads=1),
    Network(name="NAF1, 1,024 elements", make=NAF1, feed=_vector, questions=(STEP_ALONE,), threads=1),
    Network(
        name="tiny Llama", make=lambda: _llama(64, 172, 4, 256), feed=lambda count: _tokens(count, 16),
        blocks=_LLAMA_BLOCKS, questions=(STEP, INFERENCE, FIRST), threads=1, package=_PACKAGE,
    ),
    _on_images("ResNet-18, ReLU", lambda: zoo.resnet18(nn.ReLU), "BasicBlock"),
    _on_images("ResNet-18, SiLU", lambda: zoo.resnet18(nn.SiLU), "BasicBlock", questions=_ALL),
    _on_images("ResNet-18, Mish", lambda: zoo.resnet18(Mish), "BasicBlock", questions=(STEP, MEMORY)),
    _on_images("ResNet-18, x*sigmoid(a*x)", lambda: zoo.resnet18(TrainedSwish), "BasicBlock", questions=(STEP, MEMORY)),
    _on_images("ResNet-18, NAF1", lambda: zoo.resnet18(NAF1), "BasicBlock", questions=(STEP, MEMORY, BRANCHES)),
    Network(
        name="ResNet-18, SiLU, batch 1", make=lambda: zoo.resnet18(nn.SiLU), feed=_images, blocks=("BasicBlock",),
        questions=(STEP, INFERENCE),
    ),
    _on_images("ResNet-50, SiLU", lambda: zoo.resnet50(nn.SiLU), "Bottleneck"),
    _on_images("EfficientNet-B0", zoo.efficientnet_b0, "MBConv", draws=True),
    Network(
        name="Llama", make=lambda: _llama(512, 1376, 8, 1000), feed=lambda count: _tokens(count, 512), batch=4,
        counted=4, blocks=_LLAMA_BLOCKS, questions=_ALL, package=_PACKAGE,
    ),
    Network(
        name="GPT-2", make=_gpt2, feed=lambda count: _tokens(count, 512), batch=4, counted=4, blocks=("GPT2Block",),
        questions=_ALL, draws=True, package=_PACKAGE,
    ),
    Network(
        name="ViT", make=_vit, feed=lambda count: _images(count, 64, "pixel_values"), batch=32, counted=32,
        blocks=("ViTLayer",), package=_PACKAGE,
    ),
    Network(
        name="ConvNeXt", make=_convnext, feed=lambda count: _images(count, 64, "pixel_values"), batch=16, counted=16,
        blocks=("ConvNextLayer",), package=_PACKAGE,
    ),
)  # fmt: skip


def network(name: str) -> Network:
    """The network of that name."""
    return next(n for n in NETWORKS if n.name == name)
