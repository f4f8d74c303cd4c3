"""PyTorch's OpInfo database through opgraph.torch: a sample of it, the whole of it as a sweep, and what judges it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # which the database imports

from opinfo_calls import Call, all_ops, dtypes_of, tensors_in  # noqa: E402
from opinfo_findings import Sweep  # noqa: E402
from opinfo_interpreted import interpreted  # noqa: E402
from opinfo_judge import Judge  # noqa: E402
from opinfo_modules import MODULE_DTYPES, ModuleSweep, all_modules  # noqa: E402
from opinfo_refusals import listed  # noqa: E402
from opinfo_run import run  # noqa: E402
from opinfo_verdict import Finding  # noqa: E402
from opinfo_ways import Program  # noqa: E402

#: What is fused, what a library runs, views, reductions, random numbers, lists of tensors.
SAMPLE = (
    "sub", "clamp", "copysign", "where", "nn.functional.gelu", "nn.functional.prelu", "sign", "float_power", "isinf",
    "logical_and", "unbind", "split", "cumsum", "max", "sum", "matmul", "nn.functional.layer_norm",
    "nn.functional.dropout", "cat", "flip", "expand", "index_add", "masked_fill", "to", "hypot",
)  # fmt: skip
#: Kernels of these are compiled.
COMPILED = (("addcmul", torch.float32), ("nn.functional.hardsigmoid", torch.bfloat16))


@pytest.fixture(scope="module")
def ops() -> list:
    return all_ops()


@pytest.fixture(scope="module")
def modules() -> list:
    return all_modules()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample(name: str, ops: list) -> None:
    """Without a compiler, which is what takes the time: how calls are captured is the same."""
    with interpreted():
        assert not findings(name, torch.float32, ops, most=1)


#: What is one kernel, and a norm with running statistics; which checks.
MODULES = (("nn.GELU", "fge"), ("nn.BatchNorm1d", "f"))


@pytest.mark.parametrize("name,checks", MODULES)
def test_a_sample_of_modules(name: str, checks: str, modules: list) -> None:
    with interpreted():
        assert not of_modules([info for info in modules if info.name == name], [torch.float32], 1, checks)


@pytest.mark.sweep
@pytest.mark.parametrize("shard", range(8))
def test_every_module(shard: int, modules: list) -> None:
    with interpreted():
        assert not of_modules(modules[shard::8], list(MODULE_DTYPES), None)


def of_modules(modules: list, dtypes: list[torch.dtype], most: int | None, checks: str = "fge") -> str:
    sweep = ModuleSweep(["module"], most)
    return "\n".join(f"{f.op}: {f}" for info in modules for f in sweep.findings(info, dtypes, checks))


@pytest.mark.parametrize("name,dtype", COMPILED, ids=str)
def test_a_sample_of_kernels(name: str, dtype: torch.dtype, ops: list) -> None:
    assert not findings(name, dtype, ops, most=1)


def findings(name: str, dtype: torch.dtype, ops: list, most: int) -> str:
    sweep = Sweep(["function", "module"], most)
    return "\n".join(str(f) for op in ops if op.name == name for f in sweep.findings(op, [dtype], "fge"))


#: A shard is a test of the sweep.
SHARDS = 24


@pytest.mark.sweep
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_op(shard: int, ops: list) -> None:
    sweep = Sweep(["function", "module"])
    found = [f for op in ops[shard::SHARDS] for f in sweep.findings(op, dtypes_of(op))]
    assert not found, "\n".join(f"{f.op}: {f}" for f in found)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * 2


WRONG = {
    "value": (lambda x: doubled(x) * (1 + 9 * torch.finfo(x.dtype).eps), "value of result"),
    "gradient": (lambda x: doubled(x).detach() + x - x.detach(), "value of gradient 0"),
    "no gradient": (lambda x: doubled(x).detach(), "results"),
    "dtype": (lambda x: doubled(x).half(), "dtype of result"),
    "shape": (lambda x: doubled(x)[None], "shape of result"),
    "strides": (lambda x: doubled(x).t().contiguous().t(), "strides of result"),
    "type": (lambda x: [doubled(x)], "type"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_the_judge_sees_what_is_wrong(name: str, dtype: torch.dtype) -> None:
    call = Call("call", "", (torch.rand(3, 4, dtype=dtype).requires_grad_(),), {})
    judge = Judge(doubled, call, derivative=1)
    assert judge.problem(run(doubled, call, derivative=1)) == ""
    assert judge.problem(run(WRONG[name][0], call, derivative=1)).startswith(WRONG[name][1])


def test_the_judge_sees_an_argument_that_was_not_written() -> None:
    call = Call("in place", "", (torch.rand(3),), {})
    judge = Judge(torch.Tensor.exp_, call)
    assert judge.problem(run(torch.exp, call)).startswith("value of argument 0 afterwards")


def test_rounding_of_another_order_is_no_problem() -> None:
    x = torch.randn(1000)
    call = Call("call", "", (x.requires_grad_(),), {})
    judge = Judge(lambda x: (x * 3 - x * 2).sum(), call, derivative=1)
    other = Program(lambda x: (x * 3 - x * 2).flip(0).view(10, 100).sum(0).sum(), amid=False)
    assert judge.problem(run(other, call, derivative=1)) == ""


@pytest.mark.parametrize(
    "op,text,reason",
    [
        ("matmul", "torch's matmul cannot be fused: it is no pointwise function; a library runs it better", "products"),
        ("matmul", "torch's matmul cannot be fused: a reduction over data is no pointwise function", None),
        ("silu", "torch's silu cannot be fused: it is no pointwise function; a library runs it better", None),
    ],
)
def test_a_refusal_is_listed_by_op_and_words(op: str, text: str, reason: str | None) -> None:
    finding = Finding(op, "function", "float32", "call", "sample 0", False, 0, "refused", text)
    row = listed(finding)
    assert row is None if reason is None else row is not None and row.reason.startswith(reason)


def test_a_tensor_among_arguments_is_found() -> None:
    x = torch.ones(2)
    assert len(tensors_in(([x], {"a": (x, 3)}))) == 2
