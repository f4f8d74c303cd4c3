"""The rare parts of the format: carried exactly, or refused by name; never dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import ModelError, Unimplemented

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")
evaluator = pytest.importorskip("onnx.reference")

from opgraph.onnx.save import to_model  # noqa: E402  # needs onnx

helper, T = onnx.helper, onnx.TensorProto
info = helper.make_tensor_value_info
Map = onnx.TypeProto.Map


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], *, ml: bool = False, **more: Any) -> Any:
    functions, imports = more.pop("functions", []), [helper.make_opsetid("", 20)]
    imports += [helper.make_opsetid(d, 1) for d in (["ai.onnx.ml"] if ml else []) + [f.domain for f in functions]]
    graph = helper.make_graph(nodes, "g", inputs, outputs, **more)
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=functions)


def remarked() -> Any:
    """A model with a remark in every place where the format allows one."""
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"], name="n1", doc_string="of a node"),
             helper.make_node("Mul", ["x", "s"], ["m"], name="n2"), helper.make_node("Add", ["m", "c"], ["p"]),
             helper.make_node("Add", ["p", "big"], ["y"], name="n4")]  # fmt: skip
    small, big = (
        helper.make_tensor("c", T.FLOAT, [4], [1, 2, 3, 4]),
        helper.make_tensor("big", T.FLOAT, [1000, 4], np.arange(4000, dtype=np.float32).tobytes(), raw=True),
    )
    unread = helper.make_tensor("unread", T.INT64, [400], range(400))
    x = info("x", T.FLOAT, ["n*1000", 4], doc_string="of an input")
    result = model(nodes, [x], [info("y", T.FLOAT, [1000, 4])],
                   initializer=[small, big, unread], doc_string="of a graph",
                   value_info=[info("s", T.FLOAT, ["n*1000", 4])])  # fmt: skip
    result.ir_version, result.producer_name, result.producer_version, result.model_version = 11, "p", "v", 7
    result.domain, result.doc_string = "some.where", "of a model"
    for place in (nodes[0], small, big, result.graph, result.graph.input[0], result):
        target = result.graph.node[0] if place is nodes[0] else place
        target.metadata_props.add(key="a", value="b")
    for tensor, text in ((result.graph.initializer[0], "small"), (result.graph.initializer[1], "big")):
        tensor.doc_string = text
        tensor.metadata_props.add(key="k", value="v")
    note = result.graph.quantization_annotation.add()
    note.tensor_name = "x"
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="c")
    result.opset_import.append(helper.make_opsetid("unused.domain", 3))
    result.configuration.add(name="two", num_devices=2, device=["a", "b"])
    placed = result.graph.node[0].device_configurations.add()
    placed.configuration_id, placed.pipeline_stage = "two", 1
    return result


def test_metadata_round_trips_through_memory_and_files(tmp_path: Path) -> None:
    made = remarked()
    assert to_model(og.onnx.load(made), form="decomposed") == made
    onnx.save(made, tmp_path / "in.onnx")
    og.onnx.save(og.onnx.load(tmp_path / "in.onnx"), tmp_path / "out.onnx", form="decomposed")
    assert (tmp_path / "out.onnx").read_bytes() != b""
    assert onnx.load(tmp_path / "out.onnx") == remarked()


def test_data_file_layout_and_metadata_are_kept(tmp_path: Path) -> None:
    onnx.save(remarked(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    source = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for tensor in source.graph.initializer:
        if tensor.data_location == T.EXTERNAL:
            tensor.external_data.add(key="checksum", value="abc")
    (tmp_path / "m.onnx").write_bytes(source.SerializeToString())
    graph = og.onnx.load(tmp_path / "m.onnx")
    og.onnx.save(graph, tmp_path / "beside.onnx", form="decomposed")
    assert onnx.load(tmp_path / "beside.onnx", load_external_data=False) == source
    (tmp_path / "other").mkdir()
    og.onnx.save(graph, tmp_path / "other" / "m.onnx", form="decomposed")
    for got, was in zip(
        onnx.load(tmp_path / "other" / "m.onnx", load_external_data=False).graph.initializer, source.graph.initializer
    ):
        if was.data_location == T.EXTERNAL:
            keys = {e.key: e.value for e in got.external_data}
            assert (keys["location"], keys["checksum"]) == ("m.onnx.data", "abc")
            assert (got.doc_string, got.metadata_props) == (was.doc_string, was.metadata_props)
    assert og.onnx.load(tmp_path / "other" / "m.onnx") == graph


def test_quantization_annotation_of_a_removed_value_is_dropped() -> None:
    made = remarked()
    del made.graph.node[0].device_configurations[:]
    made.graph.quantization_annotation.add(tensor_name="s").quant_parameter_tensor_names.add(
        key="SCALE_TENSOR", value="c"
    )
    fused = to_model(og.onnx.load(made))
    assert [node.op_type for node in fused.graph.node] == ["Swish", "Add", "Add"]
    assert [note.tensor_name for note in fused.graph.quantization_annotation] == ["x"]


def test_unit_with_a_node_placed_on_a_device_stays_unfused() -> None:
    made = remarked()
    assert [n.op_type for n in to_model(og.onnx.load(made)).graph.node] == ["Sigmoid", "Mul", "Add", "Add"]
    with pytest.raises(og.errors.Unimplemented, match="placed on a device"):
        to_model(og.onnx.load(made), functions=True)
    del made.graph.node[0].device_configurations[:]
    assert [n.op_type for n in to_model(og.onnx.load(made)).graph.node] == ["Swish", "Add", "Add"]


# -- functions and subgraphs ----------------------------------------------------------------------------------------


def with_function() -> Any:
    body = [helper.make_node("Tanh", ["a"], ["t"]), helper.make_node("Mul", ["a", "t"], ["b"])]
    function = helper.make_function("pkg", "Act", ["a"], ["b"], body, [helper.make_opsetid("", 20)])
    function.doc_string = "of a function"
    return model([helper.make_node("Act", ["x"], ["h"], domain="pkg", name="call"),
                  helper.make_node("Neg", ["h"], ["y"])],
                 [info("x", T.FLOAT, ["n"])], [info("y", T.FLOAT, ["n"])], functions=[function])  # fmt: skip


def test_functions_of_other_domains_are_kept_if_nothing_changes() -> None:
    made = with_function()
    graph = og.onnx.load(made)
    assert [op.kind for op in graph.ops] == ["Tanh", "Multiply", "Neg"]
    assert to_model(graph, form="decomposed") == made
    assert to_model(graph) == made


@pytest.mark.parametrize("external", [False, True])
def test_new_weights_change_only_their_values(external: bool, tmp_path: Path) -> None:
    made, call = remarked(), with_function()
    made.functions.extend(call.functions)
    made.opset_import.append(helper.make_opsetid("pkg", 1))
    constants = [
        {"value": helper.make_tensor("", T.FLOAT, [4], [0, 1, 2, 3])},
        {"value_float": 2.0},
        {"value_ints": [3]},
    ]
    for place, attributes in enumerate(constants):
        node = helper.make_node("Constant", [], [f"k{place}"], **attributes)
        node.attribute[0].doc_string = "of an attribute"
        made.graph.node.append(node)
    made.graph.node[-3].attribute[0].t.doc_string = "of a constant"
    made.graph.node.extend([
        helper.make_node("Act", ["y"], ["h"], domain="pkg"), helper.make_node("Sum", ["h", "k0", "k1"], ["i"]),
        helper.make_node("Tile", ["k0", "k2"], ["j"]),
    ])  # fmt: skip
    made.graph.output.extend([info("i", T.FLOAT, [1000, 4]), info("j", T.FLOAT, ["m"])])
    onnx.save(made, tmp_path / "in.onnx", save_as_external_data=external, size_threshold=0, location="in.data")
    weights = {"c": np.float32([5, 6, 7, 8]), "big": np.full((1000, 4), 9, np.float32), "k0": np.float32([4, 5, 6, 7]),
               "k1": np.float32(0.1), "k2": np.int64([2])}  # fmt: skip
    og.onnx.save(og.onnx.load(tmp_path / "in.onnx"), tmp_path / "out.onnx", form="decomposed", weights=weights)
    source, saved = onnx.load(tmp_path / "in.onnx"), onnx.load(tmp_path / "out.onnx")
    stated = [*saved.graph.initializer, *(n.attribute[0].t for n in saved.graph.node if n.output[0] == "k0")]
    before = [*source.graph.initializer, *(n.attribute[0].t for n in source.graph.node if n.output[0] == "k0")]
    for old, new, name in zip(before, stated, ["c", "big", "unread", "k0"], strict=True):
        if name in weights:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(new), weights[name])
        for tensor in (old, new):
            for field in ("raw_data", "float_data", "int64_data"):
                tensor.ClearField(field)
    old, new = ({n.output[0]: n.attribute[0] for n in m.graph.node if n.op_type == "Constant"} for m in (source, saved))
    assert (new["k1"].f, list(new["k2"].ints)) == (np.float32(0.1), [2])
    old["k1"].f, old["k2"].ints[:] = new["k1"].f, [2]
    assert saved == source


def test_overloads_of_other_domains_need_a_target_that_reads_them() -> None:
    made = with_function()
    made.functions[0].overload = made.graph.node[0].overload = "f"
    graph = og.onnx.load(made)
    assert to_model(graph) == made
    with pytest.raises(Unimplemented, match="reads ir_version 9, the functions need 10"):
        to_model(graph, target="onnxruntime==1.17")


def test_overload_without_a_function_is_refused() -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"], overload="f")], [info("x", T.FLOAT, ["n"])],
                 [info("y", T.FLOAT, ["n"])])  # fmt: skip
    with pytest.raises(ModelError, match="no function has the overload 'f'"):
        og.onnx.load(made)


def test_loop_node_is_carried_and_runs() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c_out"]), helper.make_node("Mul", ["s", "outer"], ["s_out"]),
         helper.make_node("Identity", ["s"], ["scan"])],
        "body", [info("i", T.INT64, []), info("c", T.BOOL, []), info("s", T.FLOAT, [2])],
        [info("c_out", T.BOOL, []), info("s_out", T.FLOAT, [2]), info("scan", T.FLOAT, [2])],
    )  # fmt: skip
    made = model([helper.make_node("Sigmoid", ["x"], ["outer"]),
                  helper.make_node("Loop", ["times", "", "x"], ["y", "all"], body=body)],
                 [info("x", T.FLOAT, [2])], [info("y", T.FLOAT, [2]), info("all", T.FLOAT, ["k", 2])],
                 initializer=[helper.make_tensor("times", T.INT64, [], [3])])  # fmt: skip
    graph = og.onnx.load(made)
    assert to_model(graph, form="decomposed") == made
    x = np.float32([1, -2])
    got = og.compile(graph)(x=x)
    want = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})
    for ours, theirs in zip(got.values(), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_quantized_model_stays_unchanged() -> None:
    """Quantize and dequantize nodes stay, and so do the nodes between them."""
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
             helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]), helper.make_node("Sigmoid", ["d"], ["g"]),
             helper.make_node("QuantizeLinear", ["g", "s", "z"], ["gq"]),
             helper.make_node("DequantizeLinear", ["gq", "s", "z"], ["gd"]),
             helper.make_node("Mul", ["d", "gd"], ["m"]),
             helper.make_node("QuantizeLinear", ["m", "s", "z"], ["mq"]),
             helper.make_node("DequantizeLinear", ["mq", "s", "z"], ["y"])]  # fmt: skip
    made = model(nodes, [info("x", T.FLOAT, ["n"])], [info("y", T.FLOAT, ["n"])], initializer=[
        helper.make_tensor("s", T.FLOAT, [], [0.1]), helper.make_tensor("z", T.UINT8, [], [128])])  # fmt: skip
    graph = og.onnx.load(made)
    assert to_model(graph) == made
    x = np.linspace(-3, 3, 50, dtype=np.float32)
    want = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_array_equal(og.compile(graph)(x=x), want)


# -- types ----------------------------------------------------------------------------------------------------------


def zip_map() -> Any:
    kind = helper.make_sequence_type_proto(
        onnx.TypeProto(map_type=Map(key_type=T.INT64, value_type=helper.make_tensor_type_proto(T.FLOAT, [])))
    )
    nodes = [helper.make_node("Sigmoid", ["w"], ["x"]),
             helper.make_node("ZipMap", ["x"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[1, 2])]  # fmt: skip
    return model(nodes, [info("w", T.FLOAT, ["n", 2])], [helper.make_value_info("z", kind)], ml=True)


def vectorizer() -> Any:
    kind = onnx.TypeProto(map_type=Map(key_type=T.STRING, value_type=helper.make_tensor_type_proto(T.FLOAT, [])))
    node = helper.make_node("DictVectorizer", ["w"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b"])
    return model([node], [helper.make_value_info("w", kind)], [info("y", T.FLOAT, [1, 2])], ml=True)


def sequence() -> Any:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(T.FLOAT, ["k"]))
    nodes = [helper.make_node("ConcatFromSequence", ["w"], ["c"], axis=0), helper.make_node("Sigmoid", ["c"], ["y"])]
    return model(nodes, [helper.make_value_info("w", kind)], [info("y", T.FLOAT, [None])])


@pytest.mark.parametrize(
    ("made", "value", "expected"),
    [
        (zip_map(), np.float32([[0, 0]]), [{1: 0.5, 2: 0.5}]),
        (vectorizer(), {"b": 3.0}, [[0.0, 3.0]]),
        (sequence(), [np.float32([0]), np.float32([0, 0])], [0.5, 0.5, 0.5]),
    ],
    ids=["a sequence of maps", "a map", "a sequence"],
)
def test_maps_and_sequences_run_and_round_trip_through_text(made: Any, value: Any, expected: Any) -> None:
    graph = og.onnx.load(made)
    assert to_model(graph, form="decomposed") == made
    again = og.parse(str(graph))
    assert again == graph
    assert og.onnx.load(to_model(again)) == graph
    for one in (graph, again):
        got = og.compile(one)({"w": value})
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == expected


def sparse_constant(dims: list[int], at: list[int]) -> Any:
    tensor = helper.make_sparse_tensor(
        helper.make_tensor("v", T.FLOAT, [1], [2.0]), helper.make_tensor("i", T.INT64, [1, len(at)], at), dims
    )
    nodes = [helper.make_node("Constant", [], ["c"], sparse_value=tensor), helper.make_node("Add", ["x", "c"], ["y"])]
    return model(nodes, [info("x", T.FLOAT, dims)], [info("y", T.FLOAT, dims)])


def test_sparse_constant_is_computed_and_stays_sparse() -> None:
    made = sparse_constant([2, 3], [1, 2])
    graph = og.onnx.load(made)
    assert og.compile(graph)(x=np.zeros((2, 3), np.float32)).tolist() == [[0, 0, 0], [0, 0, 2]]
    assert to_model(graph, form="decomposed") == made


def test_huge_sparse_constant_is_carried_without_densifying() -> None:
    made = sparse_constant([1 << 20, 1 << 20], [1, 2])
    graph = og.onnx.load(made)
    assert [op.kind for op in graph.ops] == ["Wildcard", "Add"]
    assert to_model(graph, form="decomposed") == made


def test_sparse_constants_over_a_total_size_limit_stay_sparse() -> None:
    sparse = sparse_constant([1 << 22], [3]).graph.node[0].attribute[0].sparse_tensor
    nodes = [helper.make_node("Constant", [], [f"c{k}"], sparse_value=sparse) for k in range(6)]
    made = model([*nodes, helper.make_node("Sum", [f"c{k}" for k in range(6)], ["y"])], [],
                 [info("y", T.FLOAT, [1 << 22])])  # fmt: skip
    graph = og.onnx.load(made)
    assert sum(op.kind == "Wildcard" for op in graph.ops) == 2
    assert to_model(graph, form="decomposed") == made


def test_absent_optional_operand_stays_absent() -> None:
    nodes = [helper.make_node("Clip", ["x", "", "high"], ["c"]),
             helper.make_node("Resize", ["c", "", "scales"], ["y"], mode="nearest")]  # fmt: skip
    made = model(nodes, [info("x", T.FLOAT, [1, 2])], [info("y", T.FLOAT, [1, 4])], initializer=[
        helper.make_tensor("high", T.FLOAT, [], [0.5]),
        helper.make_tensor("scales", T.FLOAT, [2], [1, 2])])  # fmt: skip
    graph = og.onnx.load(made)
    assert to_model(graph, form="decomposed") == made
    assert og.compile(graph)(x=np.float32([[0, 1]])).tolist() == [[0, 0, 0.5, 0.5]]


# -- sparse initializers, outputs listed twice, training_info --------------------------------------------------------


def sparse_weight() -> Any:
    """Two sparse initializers, with linear indices and with one row for each value, and a dense one."""
    made = model([helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Sigmoid", ["m"], ["s"]),
                  helper.make_node("Mul", ["m", "s"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])],
                 [info("x", T.FLOAT, ["n", 2])], [info("y", T.FLOAT, ["n", 300])],
                 initializer=[helper.make_tensor("unread", T.FLOAT, [1], [5])])  # fmt: skip
    for name, dims, values, places in (
        ("w", [2, 300], [2, 3, 4], [[0, 0], [0, 299], [1, 7]]),
        ("b", [300], [9, 8], [0, 5]),
    ):
        numbers = helper.make_tensor(name, T.FLOAT, [len(values)], values)
        numbers.doc_string = "kept"
        at = np.asarray(places)
        made.graph.sparse_initializer.append(
            helper.make_sparse_tensor(numbers, helper.make_tensor("", T.INT64, at.shape, at.reshape(-1)), dims)
        )
    return made


def test_sparse_initializers_are_computed_and_stay_sparse(tmp_path: Path) -> None:
    made = sparse_weight()
    graph = og.onnx.load(made)
    assert [t.name for t in graph.inputs] == ["x"]
    assert to_model(graph, form="decomposed") == made
    og.onnx.save(graph, tmp_path / "m.onnx", form="decomposed")
    assert onnx.load(tmp_path / "m.onnx") == made
    assert og.onnx.load(tmp_path / "m.onnx") == graph
    fused = to_model(graph, functions=True)
    assert [s.values.name for s in fused.graph.sparse_initializer] == ["w", "b"]
    x = np.float32([[1, 2], [-1, 0.5]])
    want = ort.InferenceSession(made.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(og.compile(graph)(x=x), want, rtol=1e-6)
    np.testing.assert_allclose(ort.InferenceSession(fused.SerializeToString()).run(None, {"x": x})[0], want, rtol=1e-6)


def test_sparse_initializer_with_new_values_becomes_dense(tmp_path: Path) -> None:
    new = np.arange(300, dtype=np.float32)
    og.onnx.save(og.onnx.load(sparse_weight()), tmp_path / "m.onnx", form="decomposed", weights={"b": new})
    written = onnx.load(tmp_path / "m.onnx")
    assert [s.values.name for s in written.graph.sparse_initializer] == ["w"]
    assert np.array_equal(onnx.numpy_helper.to_array(written.graph.initializer[1]), new)


def test_output_listed_twice_is_loaded_once_and_saved_twice() -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["y"], ["z"])],
                 [info("x", T.FLOAT, ["n"])], [info(name, T.FLOAT, ["n"]) for name in ("y", "z", "y")])  # fmt: skip
    graph = og.onnx.load(made)
    assert [t.name for t in graph.outputs] == ["y", "z"]
    assert "an output that the model lists twice" in str(graph.explain())
    assert to_model(graph, form="decomposed") == made
    assert [o.name for o in to_model(graph, functions=True).graph.output] == ["y", "z", "y"]
    x = np.float32([1, -2])
    assert [v.tolist() for v in og.onnx.backend.run_model(made, [x])] == [[1, 0], [-1, 0], [1, 0]]
    del made.graph.node[1], made.graph.output[1]
    assert [v.tolist() for v in og.onnx.backend.run_model(made, [x])] == [[1, 0], [1, 0]]


def with_training() -> Any:
    made = model([helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])],
                 [info("x", T.FLOAT, ["n"])], [info("y", T.FLOAT, ["n"])])  # fmt: skip
    told = made.training_info.add()
    told.algorithm.name = "step"
    told.algorithm.node.append(helper.make_node("Anything", ["y", "w"], ["w_new"], domain="some.where"))
    told.update_binding.add(key="w", value="w_new")
    return made


def test_training_info_is_kept_or_changes_are_refused() -> None:
    graph = og.onnx.load(with_training())
    assert "training_info is carried, and not read" in str(graph.explain())
    assert to_model(graph, form="decomposed") == with_training()
    assert to_model(graph, keep=["swish"]) == with_training()
    for options in ({}, {"functions": True}, {"form": "decomposed", "opset": 21}):
        with pytest.raises(og.errors.Unimplemented, match="training_info, which speaks of the nodes as they are"):
            to_model(graph, **options)


@pytest.mark.filterwarnings("ignore:onnxruntime cannot run:RuntimeWarning")
def test_float4_values_are_returned_unchanged() -> None:
    """onnxruntime (1.32) returns a byte for each element, and only every second one belongs to the result."""
    numbers = onnx.TensorProto(name="w", data_type=T.FLOAT4E2M1, dims=[3], raw_data=b"\x21\x0f")
    nodes = [helper.make_node("Constant", [], ["y"], value=numbers)]
    made = helper.make_model(
        helper.make_graph(nodes, "g", [], [info("y", T.FLOAT4E2M1, [3])]),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=11,
    )
    graph = og.onnx.load(made)
    assert to_model(graph) == made
    for y in (og.compile(graph, device="cpu")(), og.evaluate(graph)):
        assert y.dtype.name == "float4_e2m1fn" and y.astype(np.float32).tolist() == [0.5, 1, -6]


@pytest.mark.filterwarnings("ignore:onnxruntime cannot run:RuntimeWarning")
@pytest.mark.parametrize("element", [T.FLOAT8E4M3FN, T.FLOAT8E4M3FNUZ, T.FLOAT8E5M2, T.FLOAT8E5M2FNUZ])
@pytest.mark.parametrize("saturate", [0, 1])
def test_float8_values_are_computed_as_numbers_not_bits(element: int, saturate: int) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["a"], to=element, saturate=saturate),
             helper.make_node("Cast", ["a"], ["b"], to=T.FLOAT), helper.make_node("Neg", ["b"], ["y"])]  # fmt: skip
    made = model(nodes, [info("x", T.FLOAT, ["n"])], [info("y", T.FLOAT, ["n"]), info("a", element, ["n"])])
    x = np.float32([0, -0.0, 1, 1.05, 300, 1e6, -1e6, np.inf, -np.inf, np.nan])
    expected = evaluator.ReferenceEvaluator(made).run(None, {"x": x})
    graph = og.onnx.load(made)
    for got in (og.evaluate(graph, x=x), og.compile(graph, device="cpu")(x=x)):
        np.testing.assert_array_equal(got["y"], expected[0])
        assert got["a"].dtype == expected[1].dtype
        np.testing.assert_array_equal(got["a"].astype(np.float32), expected[1].astype(np.float32))
