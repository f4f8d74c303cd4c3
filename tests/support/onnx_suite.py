"""onnx's own backend suite, as data: every test of device CPU by name, and a way to run one and see its engines."""

from __future__ import annotations

import tomllib
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.runner import Runner

from opgraph.errors import OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.opdef import all_ops
from opgraph.onnx.backend import OpGraphBackend, Prepared
from opgraph.onnx.spellings import disguises
from opgraph.onnx.target import target_of

FOLDER = Path(__file__).resolve().parents[1] / "onnx_backend"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test.

    Attributes:
        status: "pass", "wrong", "refused" (before any computation) or "skipped".
        engines: the engines that computed, in alphabetical order: "opgraph", "onnxruntime", "onnx".
        text: the error.
    """

    status: str
    engines: tuple[str, ...] = ()
    text: str = ""


class _Seen(OpGraphBackend):
    """opgraph; keeps the last model that it prepared."""

    last: Prepared | None = None

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        return True

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> Prepared:
        _Seen.last = None
        _Seen.last = super().prepare(model, device)
        return _Seen.last


class _Stock(Backend):
    """onnxruntime as it is: ir_version is lowered to the one it reads, tests with unknown opsets are skipped."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> BackendRep:
        import onnxruntime

        reader = target_of(f"onnxruntime=={onnxruntime.__version__}")
        if any(e.domain in ("", "ai.onnx") and e.version > reader.opset for e in model.opset_import):
            raise unittest.SkipTest("an opset that onnxruntime does not know")
        lowered = onnx.ModelProto()
        lowered.CopyFrom(model)
        lowered.ir_version = min(model.ir_version, reader.ir_version)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(lowered.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return _StockRep(session)


class _StockRep(BackendRep):
    def __init__(self, session: Any) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> Any:
        names = [i.name for i in self.session.get_inputs()]
        return self.session.run(
            None, {n: np.asarray(v) if isinstance(v, np.generic) else v for n, v in zip(names, inputs)}
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings: the suite's own data overflow, and onnxruntime reports its substitutes."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


@cache
def _runner(stock: bool) -> Runner:
    with _quiet():
        return Runner(_Stock if stock else _Seen, __name__)


@cache
def tests(stock: bool = False) -> dict[str, Callable[..., Any]]:
    """Every test of device CPU: its name -> a function that runs it. Takes seconds the first time."""
    found = {}
    for items in _runner(stock)._test_items.values():
        found.update({n.removesuffix("_cpu"): item.func for n, item in items.items() if n.endswith("_cpu")})
    return found


@cache
def single_nodes() -> dict[str, onnx.ModelProto]:
    """The models of the tests of one node each, without function bodies, which test several nodes."""
    from onnx.backend.test.loader import load_model_tests

    with _quiet():
        cases = [c for c in load_model_tests(kind="node") if c.model is not None and "_expanded" not in c.name]
    return {case.name: case.model for case in cases if len(case.model.graph.node) == 1}


def pointwise() -> dict[str, onnx.ModelProto]:
    """The tests of one pointwise node, as the op records define it."""
    forms = (f for record in all_ops() if record.is_pointwise and isinstance(record.onnx, tuple) for f in record.onnx)
    op_types = {form.op_type for form in forms} | {op_type for domain, op_type in disguises() if domain == ""}
    return {
        name: model
        for name, model in single_nodes().items()
        if model.graph.node[0].op_type in op_types and not model.graph.node[0].domain
    }


def has_arithmetic_types(model: onnx.ModelProto) -> bool:
    """True if all inputs and outputs have types that opgraph computes in."""
    known = {dtypes.BY_NAME[name].onnx for name in dtypes.ARITHMETIC}
    return all(v.type.tensor_type.elem_type in known for v in (*model.graph.input, *model.graph.output))


def run(name: str, *, stock: bool = False) -> Outcome:
    """Runs one test of the suite."""
    _Seen.last = None
    try:
        with _quiet():
            tests(stock)[name](None)
    except unittest.SkipTest as reason:
        return Outcome("skipped", text=str(reason))
    except OpGraphError as error:
        return Outcome("refused", text=error.what)
    except Exception as error:  # the runner raises AssertionErrors, and NumPy's errors on what it cannot compare
        return Outcome("wrong", _engines(), " ".join(str(error).split())[:200])
    return Outcome("pass", _engines())


def _engines() -> tuple[str, ...]:
    return () if _Seen.last is None else tuple(sorted(_Seen.last.engines))


def deviations() -> dict[str, dict[str, str]]:
    """The listed tests: "delegated", "refused", "random" -> name -> reason."""
    return tomllib.loads((FOLDER / "deviations.toml").read_text())
