"""The gradient rules of the records: complete, linear, right, the same from the output, and accurate.

Rules are evaluated with the NumPy references, so these tests do not depend on how gradients become graphs; only
second derivatives and the accuracy of whole rules use `og.gradient`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import points
import pytest
from ulp import errors

import opgraph as og
from opgraph.ir import dtypes, opdef
from opgraph.ir.expression import Call, Expr, Num, Param, Var
from opgraph.ir.opdef import OpDef, Port, all_ops
from opgraph.ops import samples
from opgraph.runtime import cpu_compiler

INF, NAN = float("inf"), float("nan")
FLOATS = set(dtypes.FLOATS)


def float_ports(record: OpDef) -> list[Port]:
    """The inputs that have gradients."""
    floats = [p for p in record.inputs if FLOATS & set(record.types.get(p.type, (p.type,))) and not p.shape_only]
    return [p for p in floats if not has_reason(record, p.name)]


def has_reason(record: OpDef, name: str) -> bool:
    """True if the record has a reason why one of its inputs has no gradient, though others have."""
    said = record.gradient.get(name) if isinstance(record.gradient, Mapping) else None
    return isinstance(said, str) and said.startswith("none: ") and len(said) > 20


def has_float_result(record: OpDef) -> bool:
    return record.is_pointwise and bool(FLOATS & set(record.types.get(record.outputs[0].type, ())))


DIFFERENTIABLE = [r for r in all_ops() if has_float_result(r)]
RULED = [r for r in DIFFERENTIABLE if isinstance(r.gradient, Mapping)]
UNARY = [r for r in RULED if len(r.inputs) == 1]


@pytest.fixture(autouse=True)
def _no_warnings_of_floats() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def value_of(tree: Expr, names: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> np.ndarray:
    """The value of an expression over arrays, computed with the references."""
    if isinstance(tree, Var):
        return names[tree.name]
    if isinstance(tree, (Num, Param)):
        like = next(a.dtype for a in names.values() if a.dtype.kind == "f")
        return np.asarray(tree.value if isinstance(tree, Num) else attrs[tree.name], like)
    assert isinstance(tree, Call)
    record = opdef.get(tree.kind, where="test")
    own = {n: attrs[v.name] if isinstance(v, Param) else v for n, v in tree.attrs}
    assert record.reference is not None
    assert {a.name for a in record.attrs if a.required} <= own.keys(), tree
    return np.asarray(record.reference(*[value_of(a, names, attrs) for a in tree.args], **own))


class Form:
    """One form of an op on float64 arguments."""

    def __init__(
        self, record: OpDef, ports: tuple[Port, ...], attrs: dict[str, Any], columns: list[np.ndarray]
    ) -> None:
        self.record, self.attrs, self.columns = record, attrs, columns
        self.names = [p.name for p in ports]

    def result(self, columns: list[np.ndarray] | None = None) -> np.ndarray:
        assert self.record.reference is not None
        return np.asarray(self.record.reference(*(self.columns if columns is None else columns), **self.attrs))

    def gradient(self, name: str | None, d: Any, columns: list[np.ndarray] | None = None) -> np.ndarray | None:
        """The gradient of an input by its rule; without a name, that of the only input, computed from the output."""
        tree = self.record.gradient_of(name, self.attrs, self.names)
        if tree is None:
            return None
        columns = self.columns if columns is None else columns
        result = self.result(columns)
        named = {**dict(zip(self.names, columns)), self.record.outputs[0].name: result}
        d = np.broadcast_to(np.asarray(d, np.float64), result.shape)
        return np.broadcast_to(value_of(tree, {**named, "d": d}, self.attrs), result.shape)

    @property
    def moving(self) -> list[int]:
        """Positions of the inputs that have gradients."""
        flowing = {p.name for p in float_ports(self.record)}
        return [i for i, name in enumerate(self.names) if name in flowing]


def forms(record: OpDef, count: int = 400, seed: int = 0) -> Iterator[Form]:
    if "f64" not in samples.dtypes_of(record):
        return
    for ports, attrs in samples.forms(record, "f64"):
        if record.channel_inputs and attrs.get("data_format") == "NCX":
            continue  # the layout of operands is handled by the code that applies a rule
        columns = samples.arrays(record, ports, "f64", [(count,)] * len(ports), seed=seed)
        if record.channel_inputs:
            columns[0] = columns[0][None]
        yield Form(record, ports, attrs, columns)


@pytest.fixture(params=RULED, ids=lambda r: r.kind)
def record(request: pytest.FixtureRequest) -> OpDef:
    return request.param  # type: ignore[no-any-return]


# -- completeness and linearity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", DIFFERENTIABLE, ids=lambda r: r.kind)
def test_every_op_has_a_gradient_or_a_reason(record: OpDef) -> None:
    if isinstance(record.gradient, str):
        assert len(record.gradient) > 20
        return
    assert isinstance(record.gradient, Mapping), "nobody has written it"
    assert {p.name for p in float_ports(record)} <= record.gradient.keys()


def test_gradient_rule_is_linear_in_the_output_gradient(record: OpDef) -> None:
    for form in forms(record):
        rng = np.random.default_rng(1)
        one, two = rng.normal(size=(2, *form.result().shape))
        for index in form.moving:
            name = form.names[index]
            f, g, both = (form.gradient(name, d) for d in (one, two, one + two))
            double, nothing = form.gradient(name, 2 * one), form.gradient(name, 0.0)
            assert f is not None and g is not None and both is not None and nothing is not None
            np.testing.assert_array_equal(double, 2 * f)
            np.testing.assert_allclose(both, f + g, rtol=1e-12, atol=1e-12 * float(np.max(np.abs(f), initial=0)))
            assert not np.any(nothing), name


# -- differences and torch --------------------------------------------------------------------------------------------


def differences(form: Form, index: int, step: float) -> np.ndarray:
    """The derivative by central differences of order 4."""

    def moved(k: float) -> np.ndarray:
        return form.result([c + k * step if i == index else c for i, c in enumerate(form.columns)])

    return np.asarray((8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / (12 * step))


#: Ops whose gradient is defined as none although they compute.
BY_DECREE = {"StopGradient"}


def test_gradient_rule_agrees_with_differences(record: OpDef) -> None:
    for form in forms(record) if record.kind not in BY_DECREE else ():
        for index in form.moving:
            got = form.gradient(form.names[index], 1.0)
            coarse, fine = differences(form, index, 1e-3), differences(form, index, 0.5e-3)
            scale = 1 + np.abs(fine)
            smooth = np.abs(coarse - fine) < 1e-5 * scale  # false next to a kink or a pole
            assert np.mean(smooth) > 0.9, form.attrs
            np.testing.assert_array_less(np.abs(got - fine)[smooth], (1e-5 * scale)[smooth], str(form.attrs))


def torch_gradients(form: Form, columns: list[np.ndarray]) -> dict[int, np.ndarray]:
    """The gradients by torch's autograd of the record's torch form, for d = 1."""
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(np.array(c)).requires_grad_(i in form.moving) for i, c in enumerate(columns)]
    assert form.record.torch is not None
    form.record.torch(torch, *tensors, **form.attrs).sum().backward()
    return {
        i: np.zeros(t.shape) if t.grad is None else t.grad.numpy() for i, t in enumerate(tensors) if i in form.moving
    }


def test_gradient_rule_agrees_with_autograd(record: OpDef) -> None:
    for form in forms(record):
        if torch_is_constant(form):
            continue
        for index, wanted in torch_gradients(form, form.columns).items():
            got = form.gradient(form.names[index], 1.0)
            assert got is not None
            summed = got.sum(axis=tuple(range(got.ndim - wanted.ndim))).reshape(wanted.shape)
            np.testing.assert_allclose(
                summed, wanted, rtol=1e-9, atol=1e-9, err_msg=f"{form.names[index]} {form.attrs}"
            )


def torch_is_constant(form: Form) -> bool:
    """True if in torch the result does not depend on the inputs at all."""
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(np.array(c)).requires_grad_(i in form.moving) for i, c in enumerate(form.columns)]
    assert form.record.torch is not None
    return not form.record.torch(torch, *tensors, **form.attrs).requires_grad


# -- corners ----------------------------------------------------------------------------------------------------------

CORNERS = np.array([INF, -INF, NAN, 0, -0.0, 1, -1, 0.5, -0.5, 2.5, -2.5, 3, -3, 1e-310, 1e300, -1e300])
#: Corners where torch's autograd differs: the reason for opgraph's value, and the arguments.
TORCH_DIFFERS = {
    "Abs": ("NaN at NaN, not 0", [NAN]),
    "Acosh": ("NaN below 1, where the function is", [-INF, -1, -2.5, -3, -1e300]),
    "Celu": ("torch's where() multiplies 0 by e^x", [INF, 1e300]),
    "Elu": ("torch's where() multiplies 0 by e^x", [INF, 1e300]),
    "Selu": ("torch's where() multiplies 0 by e^x", [INF, 1e300]),
    "Digamma": ("infinite at a pole, where torch has a large number", [-1, -3, -1e300]),
    "GELU": ("the limits 1 and 0 at infinity, not NaN", [INF, -INF, 1e300, -1e300]),
    "Mish": ("the limits 1 and 0 at infinity, not NaN", [INF, -INF]),
    "HardSigmoid": ("0 at both borders, as oneDNN and torch's hardsigmoid", [NAN, 0, -0.0, -1, -2.5, 1e-310, 2.5]),
    "Rsqrt": ("-inf at -0.0, where the function is", [-0.0]),
    "Sign": ("0 everywhere", [NAN]),
    "Softsign": ("the limit 0 at infinity, not NaN", [INF, -INF]),
    "I0": ("the limits at infinity, not NaN", [INF, -INF]),
    "I1": ("infinite beyond the range, not NaN, and NaN at NaN", [1e300, -1e300, NAN]),
    "LogNdtr": ("the limit -x on the left, not NaN", [-INF, -1e300]),
}


@pytest.mark.parametrize("record", UNARY, ids=lambda r: r.kind)
def test_gradients_at_corner_cases_agree_with_torch(record: OpDef) -> None:
    excused = np.array(TORCH_DIFFERS.get(record.kind, ("", []))[1])
    for form in forms(record):
        if torch_is_constant(form):
            continue
        (wanted,) = torch_gradients(form, [CORNERS]).values()
        got = form.gradient(form.names[0], 1.0, [CORNERS])
        known = np.array([not np.any((c == excused) | (np.isnan(c) & np.isnan(excused))) for c in CORNERS])
        np.testing.assert_allclose(got[known], wanted[known], rtol=1e-9, atol=1e-300, err_msg=str(form.attrs))  # type: ignore[index]


#: kind, arguments, attributes, name of the input, gradient for d = 1.
PINNED: list[tuple[str, tuple[float, ...], dict[str, Any], str, float]] = [
    ("ReLU", (0.0,), {}, "src", 0.0),
    ("Abs", (0.0,), {}, "src", 0.0),
    ("LeakyReLU", (0.0,), {"alpha": 0.25}, "src", 0.25),
    ("PReLU", (0.0, 3.0), {}, "src", 3.0),
    ("PReLU", (0.0, 3.0), {}, "slope", 0.0),
    ("PReLU", (INF, 3.0), {}, "slope", 0.0),
    ("PReLU", (-INF, 3.0), {}, "slope", -INF),
    ("Clamp", (1.0,), {"min": 1.0, "max": 2.0}, "src", 1.0),
    ("Clamp", (2.0,), {"min": 1.0, "max": 2.0}, "src", 1.0),
    ("Clamp", (3.0,), {"min": 1.0, "max": 2.0}, "src", 0.0),
    ("Clamp", (-INF,), {"min": 1.0, "max": 2.0}, "src", 0.0),
    ("Clamp", (NAN,), {"min": 1.0, "max": 2.0}, "src", 0.0),
    ("Clamp", (-2.0,), {"max": -1.0}, "src", 1.0),
    ("Clamp", (-0.5,), {"max": -1.0}, "src", 0.0),
    ("Clamp", (2.0,), {"min": 1.0}, "src", 1.0),
    ("Clamp", (0.0, 1.0, 2.0), {}, "low", 1.0),
    ("Clamp", (1.0, 1.0, 2.0), {}, "low", 0.0),
    ("Clamp", (3.0, 1.0, 2.0), {}, "high", 1.0),
    ("Clamp", (2.0, 1.0, 2.0), {}, "high", 0.0),
    ("Clamp", (0.0, 4.0, 2.0), {}, "high", 1.0),
    ("Clamp", (0.0, 4.0, 2.0), {}, "low", 0.0),
    ("Clamp", (-5.0, -1.0), {"max": -3.0}, "low", 0.0),
    ("Clamp", (-5.0, -4.0), {"max": -3.0}, "low", 1.0),
    ("Clamp", (1.0, 3.0), {"max": 1.0}, "src", 0.0),
    ("Clamp", (1.0, 0.5), {"max": 1.0}, "src", 1.0),
    ("Clamp", (1.0, 1.0), {"max": 1.0}, "src", 1.0),
    ("Maximum", (1.0, 1.0), {}, "src_0", 0.5),
    ("Maximum", (1.0, 1.0), {}, "src_1", 0.5),
    ("Maximum", (-INF, INF), {}, "src_0", 0.0),
    ("Minimum", (2.0, 2.0), {}, "src_0", 0.5),
    ("Minimum", (-INF, INF), {}, "src_0", 1.0),
    ("Pow", (0.0, 2.0), {}, "src", 0.0),
    ("Pow", (0.0, 1.0), {}, "src", 1.0),
    ("Pow", (0.0, 0.0), {}, "src", 0.0),
    ("Pow", (0.0, 0.5), {}, "src", INF),
    ("Pow", (0.0, 2.0), {}, "exponent", 0.0),
    ("Pow", (0.0, 0.0), {}, "exponent", 0.0),
    ("Pow", (0.0, -1.0), {}, "exponent", -INF),
    ("Pow", (-2.0, 3.0), {}, "src", 12.0),
    ("Pow", (-2.0,), {"beta": 2.0}, "src", -4.0),
    ("Swish", (INF,), {}, "src", 1.0),
    ("Swish", (-INF,), {}, "src", 0.0),
    ("Swish", (INF,), {"alpha": 0.0}, "src", 0.5),
    ("Swish", (INF, 1.0), {}, "factor", 0.0),
    ("Swish", (-INF, 1.0), {}, "factor", 0.0),
    ("Sigmoid", (INF,), {}, "src", 0.0),
    ("Sigmoid", (-INF,), {"alpha": 2.0}, "src", 0.0),
    ("Tanh", (-INF,), {}, "src", 0.0),
    ("SoftPlus", (-INF,), {}, "src", 0.0),
    ("SoftPlus", (INF,), {}, "src", 1.0),
    ("HardSwish", (-3.0,), {}, "src", 0.0),
    ("HardSwish", (3.0,), {}, "src", 1.0),
    ("HardSwish", (-INF,), {}, "src", 0.0),
    ("HardSigmoid", (-1.0,), {"alpha": 1.0, "beta": 1.0}, "src", 0.0),
    ("HardSigmoid", (0.0,), {"alpha": 1.0, "beta": 1.0}, "src", 0.0),
    ("Mod", (7.0, 3.0), {}, "src_1", -2.0),
    ("Mod", (-7.0, 3.0), {}, "src_1", 3.0),
    ("Mod", (-7.0, 3.0), {"fmod": 1}, "src_1", 2.0),
    ("Sqrt", (0.0,), {}, "src", INF),
    ("Asinh", (1e200,), {}, "src", 1e-200),
    ("Softsign", (-INF,), {}, "src", 0.0),
    ("Erf", (INF,), {}, "src", 0.0),
    ("Shrink", (0.5,), {}, "src", 0.0),
    ("ThresholdedRelu", (1.0,), {}, "src", 0.0),
]


@pytest.mark.parametrize(("kind", "args", "attrs", "name", "expected"), PINNED)
def test_gradient_at_a_pinned_corner_case(
    kind: str, args: tuple[float, ...], attrs: dict[str, Any], name: str, expected: float
) -> None:
    record = opdef.get(kind, where="test")
    required = {n: v for n, v in record.default_attrs().items() if record.attr(n).required is False}  # type: ignore[union-attr]
    form = Form(record, record.inputs[: len(args)], {**required, **attrs}, [np.array([a]) for a in args])
    got = form.gradient(name, 1.0)
    np.testing.assert_array_equal(got, [expected])
    if kind in ("Clamp", "Maximum", "Minimum", "Pow") and np.isfinite(args).all():
        assert_is_torchs_own(kind, args, attrs, record, name, expected)


def assert_is_torchs_own(
    kind: str, args: tuple[float, ...], attrs: dict[str, Any], record: OpDef, name: str, expected: float
) -> None:
    torch = pytest.importorskip("torch")
    call = {"Clamp": torch.clamp, "Maximum": torch.maximum, "Minimum": torch.minimum, "Pow": torch.pow}[kind]
    tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in args]
    if len(args) > 1:  # torch.clamp takes two tensors or two numbers
        attrs = {n: torch.tensor(v, dtype=torch.float64) for n, v in attrs.items()}
    (call(*tensors, *attrs.values()) if kind == "Pow" else call(*tensors, **attrs)).backward()
    index = [p.name for p in record.inputs].index(name)
    assert tensors[index].grad.item() == expected


# -- from the output --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [r for r in UNARY if r.gradient_from_output is not None], ids=lambda r: r.kind)
def test_gradient_from_the_output_equals_that_from_the_input(record: OpDef) -> None:
    said = 0
    for form in forms(record):
        points = [np.concatenate([form.columns[0], [c for c in CORNERS if not abs(c) > 1e200]])]
        whole = form.gradient(form.names[0], 1.0, points)
        from_output = form.gradient(None, 1.0, points)
        if from_output is None:
            continue
        said += 1
        tree = record.gradient_of(None, form.attrs, form.names)
        assert "src" not in {v.name for v in variables(tree)}
        finite = np.isfinite(form.result(points))
        # 1 - y cancels if y is next to 1: the error is an ulp of 1.
        np.testing.assert_allclose(from_output[finite], whole[finite], rtol=1e-9, atol=4e-16, err_msg=str(form.attrs))  # type: ignore[index]
    assert said


def variables(tree: Expr | None) -> list[Var]:
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        found += [node] if isinstance(node, Var) else []
        waiting += node.args if isinstance(node, Call) else ()
    return found


def test_leaky_relu_with_negative_alpha_has_no_gradient_from_output() -> None:
    record = opdef.get("LeakyReLU", where="test")
    assert record.gradient_of(None, {"alpha": 0.5}, ["src"]) is not None
    assert record.gradient_of(None, {"alpha": -0.5}, ["src"]) is None


# -- second derivatives -----------------------------------------------------------------------------------------------


def first_graph(form: Form, dtype: str = "f64") -> og.Graph:
    g = og.Graph()
    types = {p.name: p.type if p.type not in form.record.types else dtype for p in form.record.inputs}
    ins = [g.input(n, types[n], c.shape) for n, c in zip(form.names, form.columns)]
    g.add_op(form.record.kind, *ins, name="y", **form.attrs)
    return g.finalize()


class Twice:
    """A gradient graph and its gradient, all operands of one shape."""

    def __init__(self, form: Form) -> None:
        rng = np.random.default_rng(2)
        self.wrt = [form.names[i] for i in form.moving]
        self.first = og.gradient(first_graph(form), self.wrt)
        self.feeds = dict(zip(form.names, form.columns))
        self.feeds["d_y"] = rng.normal(size=form.result().shape)
        self.weights = {f"d_{n}": rng.normal(size=self.feeds["d_y"].shape) for n in self.wrt}
        self.by = [n for n in self.wrt if n in {t.name for t in self.first.inputs}]

    @property
    def exists(self) -> bool:
        """True if there is a second derivative that differences can measure: no sums, no op without a gradient."""
        written = all(not isinstance(opdef.get(op.kind, where="test").gradient, str) for op in self.first.ops)
        return written and bool(self.by) and all(self.feeds[n].shape == self.feeds["d_y"].shape for n in self.wrt)

    def slope(self, name: str, step: float) -> np.ndarray:
        """The weighted sum of first derivatives, differentiated by differences of order 4."""
        return np.asarray(
            (
                8 * (self.total(name, step) - self.total(name, -step))
                - (self.total(name, 2 * step) - self.total(name, -2 * step))
            )
            / (12 * step)
        )

    def total(self, name: str, change: float) -> np.ndarray:
        found = results(self.first, {**self.feeds, name: self.feeds[name] + change})
        return np.asarray(sum(self.weights[n] * found[n] for n in found))

    def second(self) -> dict[str, np.ndarray]:
        feeds = {**self.feeds, **{f"d_{n}": w for n, w in self.weights.items()}}
        return results(og.gradient(self.first, self.by), feeds)


def results(graph: og.Graph, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = og.evaluate(graph, {str(t.name): feeds[str(t.name)] for t in graph.inputs})
    return found if isinstance(found, dict) else {str(graph.outputs[0].name): found}


def test_second_derivative_agrees_with_differences_of_the_first(record: OpDef) -> None:
    for form in forms(record, count=150) if record.kind not in BY_DECREE and not record.is_cast else ():
        twice = Twice(form)
        got = twice.second() if twice.exists else {}
        for output, value in got.items():
            coarse, fine = (twice.slope(output[2:], step) for step in (1e-3, 0.5e-3))
            scale = 1 + np.abs(fine)
            smooth = np.abs(coarse - fine) < 1e-4 * scale
            assert np.mean(smooth) > 0.85, (form.attrs, output)
            np.testing.assert_array_less(np.abs(value - fine)[smooth], (1e-4 * scale)[smooth], f"{form.attrs} {output}")


SMOOTH = [
    ("Swish", {}),
    ("Swish", {"alpha": 2.0}),
    ("GELU", {}),
    ("GELU", {"mode": "gelu_tanh"}),
    ("Mish", {}),
    ("Tanh", {}),
]
SMOOTH += [("Sigmoid", {}), ("SoftPlus", {}), ("Sigmoid", {"alpha": 2.0}), ("HardSwish", {})]


@pytest.mark.parametrize(("kind", "attrs"), SMOOTH, ids=str)
def test_first_and_second_derivatives_have_their_limits_at_infinity(kind: str, attrs: dict[str, Any]) -> None:
    x = np.array([-INF, -1e300, 1e300, INF])
    record = opdef.get(kind, where="test")
    form = Form(record, record.inputs[:1], {**record.default_attrs(), **attrs}, [x])
    first = og.gradient(first_graph(form), ["src"])
    ones = np.ones(4)
    grows = kind in ("Swish", "GELU", "Mish", "SoftPlus", "HardSwish")
    np.testing.assert_array_equal(og.evaluate(first, src=x, d_y=ones), [0, 0, grows, grows])
    second = og.gradient(first, ["src"])
    np.testing.assert_array_equal(og.evaluate(second, src=x, d_y=ones, d_d_src=ones), np.zeros(4))


# -- accuracy ---------------------------------------------------------------------------------------------------------

#: In ulp of max(|f'|, |x f''|): one rounding for f16 and bf16.
BOUNDS = {"f32": 3.0, "bf16": 0.51, "f16": 0.51}


@pytest.mark.slow
@pytest.mark.parametrize("record", [r for r in UNARY if not r.is_cast], ids=lambda r: r.kind)
def test_derivative_is_accurate_in_every_form_of_its_rule(record: OpDef) -> None:
    if not cpu_compiler.is_available():
        pytest.skip("there is no C++ compiler")
    for form in forms(record, count=1):
        exact = og.gradient(of_one_input(form, "f64"), ["src"])
        if "d_y" not in {t.name for t in exact.inputs}:
            continue  # zero everywhere

        def truth(x: np.ndarray, exact: og.Graph = exact) -> np.ndarray:
            feeds = {"src": x, "d_y": np.ones(len(x))}
            return np.asarray(og.evaluate(exact, {t.name: feeds[t.name] for t in exact.inputs}))

        for name, bound in BOUNDS.items():
            dtype = dtypes.get(name).numpy
            x = points.f32_line(record, form.attrs)[::8] if name == "f32" else points.every_16_bit_value(dtype)
            graph = og.gradient(of_one_input(form, name), ["src"])
            feeds = {"src": x, "d_y": np.ones_like(x)}
            got = og.compile(graph)({t.name: feeds[t.name] for t in graph.inputs})
            wide, step = x.astype(np.float64), 2.0**-22
            wanted = truth(wide)
            moved = np.abs(truth(wide * (1 + step)) - truth(wide * (1 - step))) / (2 * step)
            found = errors(got, wanted, 0.0, np.where(np.isfinite(moved), moved, 0.0))
            # Results below the normal numbers, which a formula of several ops may flush to 0, as GPUs do anyway.
            smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
            found = np.where((np.abs(wanted) < smallest) & (np.abs(got.astype(np.float64)) <= smallest), 0.0, found)
            if record.kind == "Celu":  # for alpha < -1 it overflows before its derivative does
                y = form.result([wide]).astype(dtype)
                found = np.where(np.isinf(y) & np.isinf(got), 0.0, found)
            at = int(np.argmax(found))
            assert found[at] <= bound, f"{form.attrs} {name}: {found[at]:.3g} ulp at {x[at]}: {got[at]}, {wanted[at]}"


def of_one_input(form: Form, dtype: str) -> og.Graph:
    g = og.Graph()
    g.add_op(form.record.kind, g.input("src", dtype, (None,)), name="y", **form.attrs)
    return g.finalize()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_gradient_of_a_mean_is_rounded_once(dtype: str) -> None:
    """x - mean(x) along an axis of size 1 is 0, and so is its gradient: the subtracted value is not rounded before."""
    text = (
        "graph(x: {0}[40,1], w: {0}[40,1]) -> (y)\n  s = Multiply(x, w)\n  m = ReduceMean(s, axes=[1], keep_dims=true)"
    )
    graph = og.parse(text.format(dtype) + "\n  y = Subtract(s, m)")
    slope = og.gradient(graph, ("x",))
    assert not any(op.kind == "TypeCast" and op.outputs[0].dtype == dtype for op in slope.ops)
    rng = np.random.default_rng(0)
    feeds = {str(t.name): rng.standard_normal((40, 1)).astype(dtypes.get(dtype).numpy) for t in slope.inputs}
    assert not np.any(og.compile(slope)(feeds))


STATISTICS = {
    "LayerNorm": "y, m, v = LayerNorm(x, w, b)",
    "GroupNorm": 'y, m, v = GroupNorm(x, w, b, groups=1, data_format="NXC")',
    "BatchNorm": 'y, rm, rv, m, v = BatchNormForwardTraining(x, b, w, w, b, epsilon=1e-5, data_format="NXC")',
}


@pytest.mark.parametrize("kind", STATISTICS)
def test_norm_gradient_does_not_read_bf16_statistics(kind: str) -> None:
    """Near 10, a bf16 mean is off by up to 0.03. With bf16 parameters the statistics, which are results, are bf16."""
    text = f"graph(x: bf16[n,32], w: bf16[32], b: bf16[32]) -> (y, m, v)\n  {STATISTICS[kind]}\n"
    rng = np.random.default_rng(0)
    narrow = dtypes.get("bf16").numpy
    arrays = {"x": rng.normal(10, size=(64, 32)), "w": rng.normal(size=32), "b": rng.normal(size=32)}
    arrays = {name: array.astype(narrow) for name, array in arrays.items()}
    graph = og.parse(text)
    made, vjp = og.compile(graph, wrt=("x", "w", "b")).vjp(arrays)
    arriving = {t.name: rng.normal(size=np.shape(a)).astype(narrow) for t, a in zip(graph.outputs, made.values())}
    given = {**arrays, **{f"d_{name}": array for name, array in arriving.items()}}
    backward = og.gradient(graph, wrt=("x", "w", "b"))
    truth = og.evaluate(backward, {t.name: given[t.name] for t in backward.inputs})
    for name, gradient in vjp(arriving).items():
        exact = truth[f"d_{name}"]
        rounded = exact.astype(narrow).astype(np.float64)
        assert np.linalg.norm(gradient.astype(np.float64) - exact) <= 2 * np.linalg.norm(rounded - exact), name
