"""PyTorch's OpInfo database through opgraph.torch: a sample of it, the whole database as a sweep, and the judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # the database imports it

from opinfo_calls import Call, all_ops, dtypes_of, tensors_in  # noqa: E402
from opinfo_findings import Sweep  # noqa: E402
from opinfo_interpreted import interpreted  # noqa: E402
from opinfo_judge import Judge  # noqa: E402
from opinfo_modules import MODULE_DTYPES, ModuleSweep, all_modules  # noqa: E402
from opinfo_refusals import listed  # noqa: E402
from opinfo_run import Outcome, run  # noqa: E402
from opinfo_verdict import Finding, verdict  # noqa: E402
from opinfo_ways import Program  # noqa: E402

import opgraph.torch  # noqa: E402
from opgraph.errors import Unimplemented  # noqa: E402

#: Fused ops, library ops, views, reductions, random numbers, lists of tensors.
SAMPLE = (
    "sub", "clamp", "copysign", "where", "nn.functional.gelu", "nn.functional.prelu", "sign", "float_power", "isinf",
    "logical_and", "unbind", "split", "cumsum", "max", "sum", "matmul", "nn.functional.layer_norm",
    "nn.functional.dropout", "cat", "flip", "expand", "index_add", "masked_fill", "to", "hypot",
)  # fmt: skip
#: Ops whose kernels are compiled.
COMPILED = (("addcmul", torch.float32), ("nn.functional.hardsigmoid", torch.bfloat16))


@pytest.fixture(scope="module")
def ops() -> list:
    return all_ops()


@pytest.fixture(scope="module")
def modules() -> list:
    return all_modules()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_ops_agree_with_eager(name: str, ops: list) -> None:
    """Runs without a compiler, which would take most of the time; calls are captured in the same way."""
    with interpreted():
        assert not findings(name, torch.float32, ops, most=1)


#: Earlier findings of the sweep in functions: op, dtype, checks.
FOUND = (
    ("erfinv", torch.float32, "g"),
    ("asin", torch.float64, "s"),
    ("atanh", torch.float64, "s"),
)  # fmt: skip


@pytest.mark.parametrize("name,dtype,checks", FOUND, ids=str)
def test_functions_with_past_failures_agree_with_eager(name: str, dtype: torch.dtype, checks: str, ops: list) -> None:
    with interpreted():
        assert not findings(name, dtype, ops, 1, checks, ["function"])


#: Earlier findings of the sweep in modules with turned, expanded or channels-last inputs: op, checks.
FOUND_IN_MODULES = (
    ("native_dropout_backward", "t"),
    ("torch.ops.aten._safe_softmax.default", "t"),
    ("as_strided_scatter", "l"),
    ("nn.functional.dropout2d", "l"),
)  # fmt: skip


@pytest.mark.parametrize("name,checks", FOUND_IN_MODULES)
def test_modules_with_past_failures_agree_with_eager(name: str, checks: str, ops: list) -> None:
    with interpreted():
        assert not findings(name, torch.float32, ops, 1, checks, ["module"])


def test_interpreted_kernels_serve_all_sizes() -> None:
    """At the second size Dynamo captures a program for all sizes. Its kernels read numbers derived from the sizes."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x.shape[0] + x.shape[1]).relu() - x.sum(0) / (x.shape[0] + 2)

    model = Model()
    with interpreted():
        fused = opgraph.torch.fuse(Model())
        for rows, columns in ((3, 4), (5, 7), (9, 6), (4, 11)):
            x = torch.arange(float(rows * columns)).view(rows, columns) - 8
            torch.testing.assert_close(fused(x), model(x), rtol=1e-6, atol=0)


#: A module that is one kernel, and a norm with running statistics; and the checks.
MODULES = (("nn.GELU", "fge"), ("nn.BatchNorm1d", "f"))


@pytest.mark.parametrize("name,checks", MODULES)
def test_sampled_modules_agree_with_eager(name: str, checks: str, modules: list) -> None:
    with interpreted():
        assert not of_modules([info for info in modules if info.name == name], [torch.float32], 1, checks)


@pytest.mark.sweep
@pytest.mark.parametrize("shard", range(8))
def test_every_module_agrees_with_eager(shard: int, modules: list) -> None:
    with interpreted():
        assert not of_modules(modules[shard::8], list(MODULE_DTYPES), None)


def of_modules(modules: list, dtypes: list[torch.dtype], most: int | None, checks: str = "fge") -> str:
    sweep = ModuleSweep(["module"], most)
    return "\n".join(f"{f.op}: {f}" for info in modules for f in sweep.findings(info, dtypes, checks))


@pytest.mark.slow
@pytest.mark.parametrize("name,dtype", COMPILED, ids=str)
def test_compiled_kernels_of_sampled_ops_agree_with_eager(name: str, dtype: torch.dtype, ops: list) -> None:
    assert not findings(name, dtype, ops, most=1)


def findings(
    name: str,
    dtype: torch.dtype,
    ops: list,
    most: int,
    checks: str = "fge",
    ways: Sequence[str] = ("function", "module"),
) -> str:
    sweep = Sweep(list(ways), most)
    return "\n".join(str(f) for op in ops if op.name == name for f in sweep.findings(op, [dtype], checks))


#: The number of shards of the sweep; each is one test.
SHARDS = 24


@pytest.mark.sweep
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_op_agrees_with_eager(shard: int, ops: list) -> None:
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
def test_judge_reports_wrong_results(name: str, dtype: torch.dtype) -> None:
    call = Call("call", "", (torch.rand(3, 4, dtype=dtype).requires_grad_(),), {})
    judge = Judge(doubled, call, derivative=1)
    assert judge.problem(run(doubled, call, derivative=1)) == ""
    assert judge.problem(run(WRONG[name][0], call, derivative=1)).startswith(WRONG[name][1])


def test_judge_reports_missing_write_into_argument() -> None:
    call = Call("in place", "", (torch.rand(3),), {})
    judge = Judge(torch.Tensor.exp_, call)
    assert judge.problem(run(torch.exp, call)).startswith("value of argument 0 afterwards")


def test_judge_accepts_rounding_of_another_summation_order() -> None:
    x = torch.randn(1000)
    call = Call("call", "", (x.requires_grad_(),), {})
    judge = Judge(lambda x: (x * 3 - x * 2).sum(), call, derivative=1)
    other = Program(lambda x: (x * 3 - x * 2).flip(0).view(10, 100).sum(0).sum(), amid=False)
    assert judge.problem(run(other, call, derivative=1)) == ""


#: Functions for arithmetic that cancels most of a number of size 1e4: in parts; exact; and with a larger error.
CANCELLING = {
    "in parts": (lambda x: ((x * 0.375 + 1e4) - 1e4) + x * 0.625, ""),
    "exact": (lambda x: x + 0, ""),
    "wrong": (lambda x: x + 2**14 * 20 * torch.finfo(x.dtype).eps, "value of result"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CANCELLING)
def test_judge_allows_eagers_error_where_terms_cancel(name: str, dtype: torch.dtype) -> None:
    """At these arguments float32 is right by chance, so eager is measured at others, too."""
    call = Call("call", "", (torch.arange(256, 1024, 47, dtype=dtype) / 1024,), {})
    function, problem = CANCELLING[name]
    judge = Judge(lambda x: (x + 1e4) - 1e4, call)
    assert judge.problem(run(function, call)).partition(":")[0] == problem


def beside_what_cancels(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([(x + 1e4) - 1e4, x.exp()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_judge_allows_cancellation_error_per_element_only(dtype: torch.dtype) -> None:
    call = Call("call", "", (torch.rand(8, dtype=dtype),), {})
    judge = Judge(beside_what_cancels, call)
    off = 1 + 40 * torch.finfo(dtype).eps
    assert judge.problem(run(lambda x: torch.cat([x, x.exp()]), call)) == ""
    assert judge.problem(run(lambda x: torch.cat([x, x.exp() * off]), call)).startswith("value of result: 8 of 16")


def test_judge_lowers_dtype_arguments_to_measure_error() -> None:
    """A sum in another order cancels differently. float32 measures this only if its sum is in float32."""
    x = torch.arange(1, 65, dtype=torch.float64).sin()
    call = Call("call", "", (x,), {"dtype": torch.float64})
    judge = Judge(lambda x, dtype: ((x.to(dtype) * 3 + 1e4) - 1e4).sum(0, dtype=dtype), call)
    assert judge.problem(run(lambda x, dtype: (x * 3).sum(0, dtype=dtype), call)) == ""


#: A function, an argument at the edge of its domain or of float32's range, and a wrong result.
EDGES = {
    "domain": (torch.acos, 1.0, torch.float32, 5.0),
    "overflow": (torch.exp, 88.72283, torch.float32, 3e38),
    "underflow of float32": (torch.exp, -120.0, torch.float64, 7.6676480737e-53),
    "pole": (torch.log, 0.0, torch.float32, -103.0),
}


@pytest.mark.parametrize("name", EDGES)
def test_judge_reports_wrong_values_at_edges_of_the_domain(name: str) -> None:
    function, x, dtype, wrong = EDGES[name]
    call = Call("call", "", (torch.tensor([x, 0.5], dtype=dtype),), {})
    judge = Judge(function, call)
    assert judge.problem(run(function, call)) == ""
    got = run(lambda x: torch.stack([x[0] * 0 + wrong, function(x)[1]]), call)
    assert judge.problem(got).startswith("value of result: 1 of 2 elements, the first at [0]")


def raising(error: BaseException, file: str) -> Outcome:
    """An outcome whose error was raised in a file."""
    scope: dict = {"error": error}
    exec(compile("def f():\n    raise error", file, "exec"), scope)
    try:
        scope["f"]()
    except Exception as raised:
        return Outcome(error=raised)
    raise AssertionError


INSIDE = str(Path(opgraph.__file__).parent / "torch" / "tracing" / "trace.py")
#: The error of eager torch, the error through opgraph and the file that raises it, and the verdict.
ERRORS = {
    "the same": (IndexError("dimension out of range"), IndexError("dimension out of range (f.py:3)"), INSIDE, ""),
    "in other words": (IndexError("dimension out of range"), IndexError("list index"), INSIDE, "raw error"),
    "another class": (RuntimeError("no"), TypeError("no"), INSIDE, "raw error"),
    "before opgraph": (RuntimeError("no"), TypeError("unsupported"), "torch/_dynamo/symbolic.py", ""),
    "opgraph's": (RuntimeError("no"), Unimplemented("what", where="where", fix="fix"), INSIDE, ""),
    "refused": (None, Unimplemented("what", where="where", fix="fix"), INSIDE, "refused"),
    "raised": (None, RuntimeError("no"), "torch/_dynamo/symbolic.py", "raw error"),
    "answered": (RuntimeError("no"), None, INSIDE, "answered"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_accepted_if_torch_raises_the_same(name: str) -> None:
    expected, error, file, kind = ERRORS[name]
    judge = Judge(torch.exp, Call("call", "", (torch.ones(2),), {}))
    judge.eager = (
        run(torch.exp, Call("call", "", (torch.ones(2),), {})) if expected is None else Outcome(error=expected)
    )
    got = Outcome() if error is None else raising(error, file)
    assert verdict(judge, got, "function")[0] == kind


@pytest.mark.parametrize(
    "op,text,reason",
    [
        ("matmul", "torch's matmul cannot be fused: it is no pointwise function; a library runs it better", "products"),
        ("matmul", "torch's matmul cannot be fused: a reduction over data is no pointwise function", None),
        ("silu", "torch's silu cannot be fused: it is no pointwise function; a library runs it better", None),
    ],
)
def test_known_refusals_are_found_by_op_and_message(op: str, text: str, reason: str | None) -> None:
    finding = Finding(op, "function", "float32", "call", "sample 0", False, 0, "refused", text)
    row = listed(finding)
    assert row is None if reason is None else row is not None and row.reason.startswith(reason)


def test_tensors_in_nested_arguments_are_found() -> None:
    x = torch.ones(2)
    assert len(tensors_in(([x], {"a": (x, 3)}))) == 2
