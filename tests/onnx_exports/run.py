"""Exports of torch and transformers, read and run: one line each, and results.md with --write.

    python tests/onnx_exports/run.py [--write] [--only NAME ...] [--dtypes float32 float16 bfloat16]

Needs torch, onnxscript, transformers, onnxruntime. Run it outside of the checkout's root: transformers would take the
folder kernels/ there for a package. Errors are against the same model in float64; a model is right if opgraph's is at
most twice torch's own in the same dtype, or that of the same file in onnxruntime (in onnx's evaluator where that
refuses it).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

import exported  # noqa: E402  # found by the line above
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import opgraph as og  # noqa: E402
from opgraph.onnx.save import to_model  # noqa: E402
from opgraph.partition.rules import find_units  # noqa: E402

TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class Only(torch.nn.Module):
    """A model that returns its main output alone."""

    def __init__(self, model: torch.nn.Module, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = {"use_cache": False} if self.output == "logits" else {}
        return getattr(self.model(x, **extra), self.output)


def _causal(config: Any) -> torch.nn.Module:
    return Only(transformers.AutoModelForCausalLM.from_config(config), "logits")


def _llama() -> torch.nn.Module:
    return _causal(transformers.LlamaConfig(**TEXT, num_key_value_heads=2))


def _qwen() -> torch.nn.Module:
    return _causal(transformers.Qwen2Config(**TEXT, num_key_value_heads=2))


def _gpt2() -> torch.nn.Module:
    return _causal(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )


def _bert() -> torch.nn.Module:
    return Only(transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False), "last_hidden_state")


def _clip() -> torch.nn.Module:
    config = transformers.CLIPTextConfig(**TEXT, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    return Only(transformers.CLIPTextModel(config), "last_hidden_state")


def _efficientnet() -> torch.nn.Module:
    config = transformers.EfficientNetConfig(width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320)
    return Only(transformers.EfficientNetModel(config), "last_hidden_state")


def _mobilevit() -> torch.nn.Module:
    config = transformers.MobileViTConfig(
        hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 8, 8, 16, 24, 32], image_size=64
    )
    return Only(transformers.MobileViTModel(config, expand_output=False), "last_hidden_state")


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "llama": (_llama, "text"),
    "qwen2": (_qwen, "text"),
    "gpt2": (_gpt2, "text"),
    "bert": (_bert, "text"),
    "clip text": (_clip, "text"),
    "efficientnet": (_efficientnet, "image"),
    "mobilevit": (_mobilevit, "image"),
}


def _arguments(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, dict[int, Any]]:
    if kind == "text":
        return torch.randint(2, 64, (2, 9)), {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    return torch.randn(2, 3, 64, 64).to(dtype), {0: torch.export.Dim("batch")}


def _calibrate(model: torch.nn.Module) -> None:
    """Weights whose activations neither vanish nor explode: what an untrained network has makes every result alike."""
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(module.weight)


def _error(got: Any, truth: np.ndarray) -> float:
    """The root of the mean square, relative to that of the truth: the largest of 10,000 differences says little."""
    difference = np.asarray(got).astype(np.float64) - truth
    return float(np.sqrt(np.mean(difference**2) / np.mean(truth**2)))


def _line(name: str, dtype_name: str, opset: int) -> str:
    make, kind = MODELS[name]
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    model = make().eval()
    _calibrate(model)
    model = model.to(dtype)
    x, dynamic = _arguments(kind, dtype)
    with torch.no_grad():
        own = model(x)
        proto = _exported(model, x, opset, dynamic)
        truth = model.double()(x.double() if x.is_floating_point() else x).numpy()
    started = time.perf_counter()
    graph = og.onnx.load(proto)
    read = time.perf_counter() - started
    same = to_model(graph, form="decomposed") == proto
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        run = og.compile(graph)
        feeds = {graph.inputs[0].name: exported.numpy_of(x)}
        got = run(feeds)
    ours, theirs = _error(got, truth), _error(exported.numpy_of(own), truth)
    units = Counter(unit.name for unit in find_units(graph))
    engines = Counter(run.engines)
    elsewhere, stock = _others(proto, graph.inputs[0].name, x)
    file = float("nan") if elsewhere is None else _error(elsewhere, truth)
    right = "yes" if ours <= 2 * np.nanmax([theirs, file]) else "NO"
    return (
        f"| {name} | {dtype_name} | {opset} | {len(proto.graph.node)} | {_listed(units)} | {_listed(engines)} "
        f"| {ours:.1e} | {theirs:.1e} | {file:.1e} | {right} | {'yes' if same else 'NO'} | {stock} | {1e3 * read:.0f} |"
    )


def _exported(model: torch.nn.Module, x: torch.Tensor, opset: int, dynamic: dict[int, Any]) -> Any:
    """The exporter's model; in bf16 without its optimizer, which leaves f32 weights where it folds a BatchNorm."""
    return exported.export(model, (x,), opset, dynamic_shapes=(dynamic,), optimize=x.dtype != torch.bfloat16)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _others(proto: Any, name: str, x: torch.Tensor) -> tuple[np.ndarray | None, str]:
    """The outputs of the file elsewhere (onnxruntime, else onnx's evaluator), and whether onnxruntime runs it."""
    import onnxruntime

    from opgraph.runtime.providers.onnx_loop import evaluator

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, {name: x.numpy()})[0], "yes"
    except Exception as error:  # onnxruntime's classes share no base
        said = "no: " + " ".join(str(error).split("] :")[-1].split())[:60].replace("|", "/")
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return evaluator(proto).run(None, {name: exported.numpy_of(x)})[0], said
    except Exception:  # nor do the evaluator's
        return None, said


def _zoo(opset: int, dtype_name: str) -> str:
    """One line for the zoo of activations: the older exporter before opset 18, as the newer writes 18 then."""
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    x = (torch.randn(3, 8) * 3).to(dtype)
    zoo = {**exported.ZOO, **exported.NEW_ONLY} if opset >= 18 else dict(exported.ZOO)
    if opset < 14:
        zoo.pop("hardswish")
    make = exported.export if opset >= 18 else exported.export_by_tracing
    proto = make(exported.Zoo(zoo).to(dtype), (x,), opset)
    graph = og.onnx.load(proto)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = list(og.compile(graph)({"x": exported.numpy_of(x)}).values())
    worst = max(exported.rounding_errors(g, f(x)) for g, f in zip(got, zoo.values(), strict=True))
    foreign = sorted({str(op.attrs["onnx_op"]) for op in graph.ops if op.kind == "Wildcard"})
    same = to_model(graph, form="decomposed") == proto
    return f"| {opset} | {dtype_name} | {len(zoo)} | {worst:.2f} | {'yes' if same else 'NO'} | {', '.join(foreign)} |"


def _run_zoo() -> int:
    print("| opset | dtype | activations | worst, in roundings of torch's dtype | saved as it was | not native |")
    print("|---|---|---|---|---|---|")
    failed = 0
    for opset in range(13, 26):
        for dtype in ("float32", "float16", "bfloat16") if opset >= 18 else ("float32",):
            line = _zoo(opset, dtype)
            print(line, flush=True)
            failed |= "| NO" in line or float(line.split("|")[4]) >= 2
    return int(failed)


def main() -> int:
    """Returns 1 where a model is wrong, or does not come back as it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write results.md")
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--zoo", action="store_true", help="the activations instead, at every opset")
    given = parser.parse_args()
    if given.zoo:
        return _run_zoo()
    lines = []
    for name in given.only:
        for dtype in given.dtypes:
            try:
                line = _line(name, dtype, given.opset)
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                line = f"| {name} | {dtype} | {given.opset} | NO: {type(error).__name__}: {text} |"
            print(line, flush=True)
            lines.append(line)
    head = [
        "# transformers' models, exported by torch, read and run",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, random weights; by `run.py --write`.",
        "Errors are root mean squares relative to the model's in float64. bf16 is exported without the exporter's",
        "optimizer, which leaves f32 weights in a bf16 Conv where it folds a BatchNorm: such a file is refused.",
        "",
        "| model | dtype | opset | nodes | units | partitions by engine | error | torch's | the file's elsewhere "
        "| right | saved as it was | stock onnxruntime runs it | load, ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    if given.write:
        (HERE / "results.md").write_text("\n".join([*head, *lines]) + "\n")
    return int(any("| NO" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
