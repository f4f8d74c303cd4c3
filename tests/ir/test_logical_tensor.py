"""LogicalTensor: getters, memory size, equality, host scalars, strides (oneDNN's API tests, items 1 to 5)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opgraph as og
from opgraph.errors import InvalidArguments, InvalidDataType, OpGraphError
from opgraph.ir import dtypes


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 3, 4, 5)])
def test_getters_return_the_given_values(shape: tuple[int, ...]) -> None:
    t = og.LogicalTensor(7, "f16", shape, layout="strided", property="constant", name="n")
    assert (t.id, t.dtype, t.dims, t.layout, t.property, t.name) == (7, "f16", shape, "strided", "constant", "n")
    assert (t.get_dims(), t.shape, t.ndim, t.has_known_shape) == (shape, shape, len(shape), True)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((3,), (1,)), ((2, 3, 4, 5), (60, 20, 5, 1)), ((2, 0, 5), (5, 5, 1)), ((2, 1, 3), (3, 3, 1))],
)
def test_strides_are_row_major_and_a_dimension_of_0_counts_as_1(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    assert og.LogicalTensor(0, "f32", shape).get_strides() == strides


def test_given_strides_are_kept() -> None:
    t = og.LogicalTensor(0, "f32", (2, 3), strides=[1, 2])
    assert t.strides == t.get_strides() == (1, 2)


@pytest.mark.parametrize(
    ("tensor", "call"),
    [
        (og.LogicalTensor(0, "f32", None), "get_dims"),
        (og.LogicalTensor(0, "f32", None), "get_strides"),
        (og.LogicalTensor(0, "f32", (None, 2)), "get_strides"),
        (og.LogicalTensor(0, "f32", ("n", 2)), "get_strides"),
        (og.LogicalTensor(0, "f32", (2,), layout="opaque"), "get_strides"),
        (og.LogicalTensor(0, "f32", (2,), layout="any"), "get_strides"),
    ],
    ids=lambda v: repr(v),
)
def test_unknown_fields_raise_when_queried(tensor: og.LogicalTensor, call: str) -> None:
    with pytest.raises(InvalidArguments):
        getattr(tensor, call)()


def test_unknown_dimensions_are_returned_as_none_or_symbols() -> None:
    assert og.LogicalTensor(0, "f32", (None, "seq + 1", 4)).get_dims() == (None, "seq + 1", 4)
    assert og.LogicalTensor(0, "f32", None).ndim is None


def test_copy_keeps_the_id_and_validates_changes() -> None:
    t = og.LogicalTensor(3, "f32", (2,), name="x")
    assert t.with_(dims=(4,)) == og.LogicalTensor(3, "f32", (4,), name="x")
    with pytest.raises(InvalidArguments):
        t.with_(dims=(-4,))
    with pytest.raises(TypeError, match="colour"):
        t.with_(colour="red")


def test_logical_tensor_is_immutable() -> None:
    with pytest.raises(AttributeError):
        og.LogicalTensor(0, "f32", ()).dtype = "f16"  # type: ignore[misc]


# -- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(dtypes.BY_NAME))
def test_mem_size_is_elements_times_itemsize_and_4_bits_are_packed(dtype: str) -> None:
    bits = 4 if dtype in ("s4", "u4") else 8 * dtypes.get(dtype).itemsize
    for shape, count in (((), 1), ((3,), 3), ((3, 5), 15), ((3, 0), 0)):
        assert og.LogicalTensor(0, dtype, shape).mem_size == (count * bits + 7) // 8


def test_mem_size_of_strided_tensors_is_their_span() -> None:
    assert og.LogicalTensor(0, "f32", (2, 3), strides=(4, 1)).mem_size == 4 * 7
    assert og.LogicalTensor(0, "f32", (2, 3), strides=(0, 1)).mem_size == 4 * 3


@pytest.mark.parametrize(
    "tensor",
    [
        og.LogicalTensor(0, "f32", None),
        og.LogicalTensor(0, "f32", (None,)),
        og.LogicalTensor(0, "f32", (2,), layout="any"),
        og.LogicalTensor(0, "f32", (2,), layout="undef"),
        og.LogicalTensor(0, "undef", (2,)),
    ],
    ids=repr,
)
def test_mem_size_of_unknown_shape_raises(tensor: og.LogicalTensor) -> None:
    with pytest.raises(InvalidArguments):
        _ = tensor.mem_size


# -- equality -----------------------------------------------------------------------------------------------------


def test_is_equal_compares_fields_and_ignores_the_name() -> None:
    a, b = og.LogicalTensor(0, "f32", (2, 3), name="a"), og.LogicalTensor(0, "f32", [2, 3], name="b")
    assert a.is_equal(b) and a != b and a == a.with_() and hash(a) == hash(a.with_())


def test_row_major_strides_equal_strides_left_out() -> None:
    assert og.LogicalTensor(0, "f32", (2, 3)).is_equal(og.LogicalTensor(0, "f32", (2, 3), strides=(3, 1)))


@pytest.mark.parametrize(
    "change",
    [
        {"id": 1}, {"dtype": "f16"}, {"dims": (3, 2)}, {"dims": None}, {"layout": "any"}, {"property": "constant"},
        {"strides": (1, 2)},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_one_different_field_makes_tensors_unequal(change: dict[str, Any]) -> None:
    t = og.LogicalTensor(0, "f32", (2, 3))
    assert not t.is_equal(t.with_(**change)) and t != t.with_(**change)


def test_a_tensor_is_not_equal_to_other_things() -> None:
    assert og.LogicalTensor(0, "f32", ()) != 0


# -- defaults and properties --------------------------------------------------------------------------------------


def test_defaults_are_strided_and_variable() -> None:
    t = og.LogicalTensor(0, "f32", ())
    assert (t.layout, t.property, t.strides, t.name, t.data) == ("strided", "variable", None, None, None)
    assert og.LogicalTensor(0, "f32", (), name="").name is None


@pytest.mark.parametrize("dtype", ["s32", "s64", "f32"])
def test_a_host_scalar_is_0d_of_s32_s64_or_f32(dtype: str) -> None:
    assert og.LogicalTensor(0, dtype, (), property="host_scalar").property == "host_scalar"
    with pytest.raises(InvalidArguments, match="host scalar"):
        og.LogicalTensor(0, dtype, (1,), property="host_scalar")


@pytest.mark.parametrize("dtype", ["f16", "s8", "f64", "boolean"])
def test_a_host_scalar_of_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(InvalidArguments, match="host scalar"):
        og.LogicalTensor(0, dtype, (), property="host_scalar")


# -- accepted and refused values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [[2, 3], np.array([2, 3]), (np.int64(2), np.uint8(3)), iter((2, 3)), range(2, 4)])
def test_dims_accept_any_sequence_of_integers(dims: Any) -> None:
    t = og.LogicalTensor(np.int64(5), "f32", dims)  # type: ignore[arg-type]
    assert t.dims == (2, 3) and all(type(d) is int for d in t.dims) and type(t.id) is int


@pytest.mark.parametrize("dims", [(-1,), (2.0,), (True,), ("",), ((2,),), 4, "ab", b"ab", (b"n",)], ids=repr)
def test_invalid_dims_are_refused(dims: Any) -> None:
    with pytest.raises(InvalidArguments):
        og.LogicalTensor(0, "f32", dims)


@pytest.mark.parametrize("id", [-1, 1.0, True, "0", None], ids=repr)
def test_id_must_be_a_non_negative_integer(id: Any) -> None:
    with pytest.raises(InvalidArguments, match="id"):
        og.LogicalTensor(id, "f32", ())


@pytest.mark.parametrize("dtype", ["float32", "", None, np.float32, ["f32"]], ids=repr)
def test_unknown_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(InvalidDataType, match="unknown dtype"):
        og.LogicalTensor(0, dtype, ())


@pytest.mark.parametrize(
    "keywords",
    [
        {"layout": "blocked"}, {"property": "weights"}, {"strides": (1,)}, {"strides": (-1, 1)}, {"strides": (1.5, 1)},
        {"strides": (True, 1)}, {"strides": "11"}, {"strides": (3, 1), "layout": "any"}, {"name": 5},
    ],
    ids=str,
)  # fmt: skip
def test_inconsistent_fields_are_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(InvalidArguments):
        og.LogicalTensor(0, "f32", (2, 3), **keywords)


# -- data ---------------------------------------------------------------------------------------------------------


def test_tensor_with_data_is_a_read_only_constant() -> None:
    array = np.arange(3, dtype=np.float32)
    t = og.LogicalTensor(0, "f32", (3,), data=array)
    array[0] = 9
    assert t.is_constant and t.property == "constant" and t.data is not None and t.data[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        t.data[0] = 1


def test_read_only_view_of_writable_array_is_copied() -> None:
    array = np.arange(3, dtype=np.float32)
    for view in (np.broadcast_to(array, (2, 3)), np.broadcast_to(array, (2, 3))[1:, ::-1]):
        t = og.LogicalTensor(0, "f32", view.shape, data=view)
        before = view.copy()
        array += 1
        np.testing.assert_array_equal(t.data, before)


@pytest.mark.parametrize("how", ["bytearray", "memoryview", "array interface", "torch"])
def test_read_only_array_over_writable_buffer_is_copied(how: str) -> None:
    memory = bytearray(np.float32([1, 2]).tobytes())
    if how == "torch":
        torch = pytest.importorskip("torch")
        owner: Any = torch.frombuffer(memory, dtype=torch.float32)
        data = owner.numpy()
    elif how == "array interface":
        data = np.asarray(_Exporter(memory))
    else:
        data = np.frombuffer(memory if how == "bytearray" else memoryview(memory).toreadonly(), np.float32)
    data.flags.writeable = False
    kept = og.LogicalTensor(0, "f32", (2,), data=data)
    memory[:4] = np.float32(9).tobytes()
    np.testing.assert_array_equal(kept.data, [1, 2])


class _Exporter:
    """An object of another library whose memory NumPy reads."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (address, True), "version": 3}


def test_read_only_data_are_not_copied() -> None:
    array = np.arange(3, dtype=np.float32)
    array.flags.writeable = False
    assert og.LogicalTensor(0, "f32", (3,), data=array).data is array


def test_bytes_and_read_only_mmaps_are_not_copied(tmp_path: Path) -> None:
    content = np.arange(3, dtype=np.float32).tobytes()
    (tmp_path / "data").write_bytes(content)
    with (tmp_path / "data").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for memory in (content, memoryview(content), mapped):
        array = np.frombuffer(memory, np.float32)[:2]
        assert og.LogicalTensor(0, "f32", (2,), data=array).data is array


@pytest.mark.parametrize(
    ("dtype", "dims", "data"),
    [
        ("f32", (3,), np.zeros(3)),
        ("f32", (3,), np.zeros(2, np.float32)),
        ("f32", None, np.zeros(2, np.float32)),
        ("undef", (3,), np.zeros(3)),
        ("bf16", (), np.array(0, np.float16)),
        ("f32", (2,), [0.0, 1.0]),
    ],
    ids=lambda v: str(v)[:12],
)
def test_data_of_another_dtype_or_shape_is_refused(dtype: str, dims: Any, data: Any) -> None:
    with pytest.raises((InvalidDataType, InvalidArguments)) as caught:
        og.LogicalTensor(0, dtype, dims, data=data)
    assert isinstance(caught.value, OpGraphError)


def test_data_compare_by_bits() -> None:
    def tensor(value: Any, dtype: Any = ml_dtypes.bfloat16) -> og.LogicalTensor:
        return og.LogicalTensor(0, "bf16", (), data=np.array(value, dtype))

    assert tensor(np.nan).is_equal(tensor(-np.nan))
    assert not tensor(0.0).is_equal(tensor(-0.0))
    assert not tensor(0.0).is_equal(og.LogicalTensor(0, "bf16", (), property="constant"))


@pytest.mark.parametrize("strides", [3, 2.5, "21", {3, 1}, object()])
def test_invalid_strides_are_refused(strides: Any) -> None:
    with pytest.raises(InvalidArguments, match="are no element counts"):
        og.LogicalTensor(0, "f32", (2, 3), strides=strides)
