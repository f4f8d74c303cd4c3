"""Calls that write to existing tensors: plans and lazy runs recognize them by the same function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402
from torch.overrides import get_overridable_functions  # noqa: E402

import opgraph.torch as ogt  # noqa: E402
from opgraph.torch.tracing.calls import table  # noqa: E402
from opgraph.torch.tracing.tensor_calls import Watch, told_to_write, writes  # noqa: E402

FUNCTIONS = sorted({f for group in get_overridable_functions().values() for f in group}, key=str)
#: Functions that write by torch's schemas, but only to new memory, to a handle, or in a form that takes Python lists.
NO_DATA = {
    "record_stream",
    "retain_grad",
    "sort",
    "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation",
}


def mutates(schema: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write and not a.is_out for a in schema.arguments)


def test_every_aten_op_with_mutable_schema_is_recognised() -> None:
    missing, known = [], 0
    for function in FUNCTIONS:
        name = getattr(function, "__name__", "")
        if name and any(map(mutates, torch._C._jit_get_schemas_for_operator("aten::" + name))):
            known += writes(function)
            if not writes(function) and name not in NO_DATA:
                missing.append(name)
    assert not missing and known > 100


def test_arithmetic_table_agrees_with_in_place_names() -> None:
    assert [f for f, found in table().items() if found.inplace != writes(f)] == []


IN_PLACE = [n for n in dir(functional) if "inplace" in getattr(getattr(functional, n), "__annotations__", ())]


@pytest.mark.parametrize("name", IN_PLACE)
def test_positional_inplace_argument_is_recognised(name: str) -> None:
    function = getattr(functional, name)
    values = {"threshold": 0.5, "value": 1.0, "inplace": True}
    given = [values.get(p.name, p.default) for p in list(inspect.signature(function).parameters.values())[1:]]
    x = torch.rand({"dropout2d": (2, 3, 4, 5), "dropout3d": (2, 3, 4, 5, 6)}.get(name, (2, 3, 4)))
    with Watch() as watch:
        function(x, *given)
    assert [call.changes for call in watch.calls] == [True]


total, mean, weight = torch.zeros(3), torch.zeros(3), torch.ones(4, 3)
one, index, fourth = torch.ones(3), torch.tensor([0]), torch.ones(4, 3) / 4


def result_given(x: Any) -> Any:
    torch.add(total, 1, out=total)
    return torch.sigmoid(x) * x


def one_overload(x: Any) -> Any:
    torch.ops.aten.add_.Tensor(total, one)
    return torch.sigmoid(x) * x


def statistics(x: Any) -> Any:
    functional.batch_norm(weight, total, mean, training=True)
    return torch.sigmoid(x) * x


def by_argument(x: Any) -> Any:
    functional.elu(total, inplace=True)
    return torch.sigmoid(x) * x


def renormalized(x: Any) -> Any:
    functional.embedding(index, weight, max_norm=0.5)
    weight.add_(fourth)
    return torch.sigmoid(x) * x


@pytest.mark.parametrize("function", [result_given, one_overload, statistics, by_argument, renormalized])
def test_fused_function_repeats_its_writes_at_every_call(function: Callable[..., Any]) -> None:
    x, states = torch.ones(5), []
    for call in function, ogt.fuse(function):
        for tensor, value in (total, -1), (mean, 0), (weight, 1):
            tensor.fill_(value)
        for _ in range(3):
            call(x)
        states.append([t.clone() for t in (total, mean, weight)])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_embedding_counts_as_a_write_only_with_max_norm() -> None:
    assert not writes(functional.embedding) and not told_to_write({"max_norm": None, "out": None, "inplace": False})
    assert told_to_write({"max_norm": 0.5}) and told_to_write({"out": total}) and told_to_write({"inplace": True})
