"""A model file is untrusted input: loading always ends in a graph or in one of opgraph's errors."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.errors import ModelError, OpGraphError, Unimplemented

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
helper, T = onnx.helper, onnx.TensorProto
F = T.FLOAT


def info(name: str, shape: Any = ("n", 4), element: int = F) -> Any:
    return helper.make_tensor_value_info(name, element, shape)


def model(nodes: list[Any], *, functions: tuple[Any, ...] = (), **graph: Any) -> Any:
    made = helper.make_graph(nodes, "g", graph.pop("inputs", [info("x")]), graph.pop("outputs", [info("y")]), **graph)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("d", 1)]
    return helper.make_model(made, opset_imports=imports, ir_version=10, functions=list(functions))


def relu(x: str = "x", y: str = "y", name: str = "") -> Any:
    return helper.make_node("Relu", [x], [y], name=name)


def function(name: str, body: list[Any]) -> Any:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("d", 1)]
    return helper.make_function("d", name, ["x"], ["y"], body, imports)


def call(name: str, x: str = "x", y: str = "y") -> Any:
    return helper.make_node(name, [x], [y], domain="d")


def twice(callee: Any) -> list[Any]:
    first, second = onnx.NodeProto(), onnx.NodeProto()
    first.CopyFrom(callee), second.CopyFrom(callee)
    first.output[0], second.input[0] = "m", "m"
    return [first, second]


def tensor(**fields: Any) -> Any:
    return onnx.TensorProto(**{"name": "c", "data_type": F, "dims": [4], "raw_data": bytes(16), **fields})


def with_constant(**fields: Any) -> Any:
    return model([helper.make_node("Add", ["x", "c"], ["y"])], initializer=[tensor(**fields)])


def sparse(*, at: int = 0, dims: Any = (4,), element: int = F, copies: int = 1, also: Any = ()) -> Any:
    made = model([helper.make_node("Add", ["x", "c0"], ["y"])], initializer=also)
    for number in range(copies):
        values = helper.make_tensor(f"c{number}", element, [1], [1.0])
        indices = helper.make_tensor("i", T.INT64, [1], [at])
        made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, dims))
    return made


def sparse_inside() -> Any:
    branch = helper.make_graph([relu("x", "z")], "b", [], [info("z")])
    branch.sparse_initializer.extend(sparse().graph.sparse_initializer)
    return model([helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
                 initializer=[helper.make_tensor("c", T.BOOL, [], [True])])  # fmt: skip


def training_in_a_file() -> Any:
    made = model([relu()])
    inner = helper.make_graph([], "b", [], [])
    inner.initializer.append(onnx.TensorProto(name="w", data_type=F, dims=[4], data_location=T.EXTERNAL))
    made.training_info.add().algorithm.node.append(helper.make_node("If", ["c"], ["y"], then_branch=inner))
    return made


def changed(change: Callable[[Any], None]) -> Any:
    made = model([relu()])
    change(made)
    return made


def bomb(levels: int = 40) -> Any:
    doubled = [function(f"f{k}", twice(call(f"f{k - 1}"))) for k in range(1, levels)]
    return model([call(f"f{levels - 1}")], functions=(function("f0", twice(relu())), *doubled))


def negative_size(made: Any) -> None:
    made.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -4


def reference_attribute(made: Any) -> None:
    made.graph.node[0].op_type = "Elu"
    made.graph.node[0].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="a", type=1))


MALFORMED = {
    "unsorted": model([relu("m", "y"), relu("x", "m")]),
    "cycle": model([relu("y", "m"), relu("m", "y")]),
    "two producers": model([relu(), relu()]),
    "a node makes an input": model([relu("x", "x"), relu()]),
    "two initializers of one name": model(
        [helper.make_node("Add", ["x", "c"], ["y"])], initializer=[tensor(), tensor()]
    ),
    "sparse index out of range": sparse(at=4),
    "sparse shape of no dimension": sparse(dims=()),
    "a sparse and a dense initializer of one name": sparse(also=[tensor(name="c0")]),
    "an output twice, of two shapes": model([relu()], outputs=[info("y"), info("y", ("n", 5))]),
    "undefined value": model([relu("nowhere")]),
    "undefined output": model([relu("x", "z")]),
    "unknown op": model([helper.make_node("Nope", ["x"], ["y"])]),
    "unknown attribute": model([helper.make_node("Relu", ["x"], ["y"], nope=1)]),
    "too many inputs": model([helper.make_node("Relu", ["x", "x"], ["y"])]),
    "two dtypes": model([helper.make_node("Add", ["x", "z"], ["y"])], inputs=[info("x"), info("z", element=T.DOUBLE)]),
    "domain not imported": model([helper.make_node("Foo", ["x"], ["y"], domain="elsewhere")]),
    "function calls itself": model([call("f")], functions=(function("f", [call("f")]),)),
    "functions in a circle": model([call("f")], functions=(function("f", [call("g")]), function("g", [call("f")]))),
    "function twice": model([call("f")], functions=(function("f", [relu()]), function("f", [relu()]))),
    "function takes an outer value": model([relu("x", "o"), call("f")], functions=(function("f", [relu("o", "y")]),)),
    **{
        f"an equation with {name}": model([helper.make_node("Einsum", ["x"], ["y"], equation=equation)])
        for name, equation in (("a line break", "a\nb"), ("a tab", "a\tb"), ("a parenthesis", "(ij)"))
    },
    "raw data too short": with_constant(raw_data=bytes(12)),
    "raw data too long": with_constant(raw_data=bytes(20)),
    "huge dims": with_constant(dims=[1 << 45, 1 << 40]),
    "negative dims": with_constant(dims=[-4]),
    "no such element type": with_constant(data_type=77),
    "value_info contradicts": model([relu()], outputs=[info("y", ("n", 5))]),
    "an input that is an output of another shape": changed(lambda m: m.graph.output.extend([info("x", ("n", 5))])),
    "negative size of an input": changed(negative_size),
    "two imports of one domain": changed(lambda m: m.opset_import.append(helper.make_opsetid("ai.onnx", 20))),
    "attribute refers to no function": changed(reference_attribute),
    "ir_version of tomorrow": changed(lambda m: setattr(m, "ir_version", 99)),
    "opset of tomorrow": changed(lambda m: setattr(m.opset_import[0], "version", 99)),
    "no graph": onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 20)]),
    "nothing": onnx.ModelProto(),
}

REFUSED = {
    "sparse initializer of a subgraph": (sparse_inside(), "a subgraph has sparse initializers: c0"),
    "sparse initializer that is huge": (sparse(dims=(1 << 45,)), "35,184,372,088,832 elements"),
    "sparse initializers that are huge together": (sparse(dims=(1 << 20,), copies=20), "1,048,576 elements"),
    "sparse initializer of a type without a word": (sparse(element=T.COMPLEX64), "elements of type 14"),
    "function bomb": (bomb(), "unfold"),
    "training_info with a data file": (training_in_a_file(), "training_info has tensors in a data file"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_models_raise_three_line_errors(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(MALFORMED[name].SerializeToString())
    with pytest.raises(ModelError) as caught:
        og.onnx.load(tmp_path / "m.onnx")
    what, where, fix = str(caught.value).splitlines()
    assert "m.onnx" in where
    assert where.startswith("  where: ")
    assert fix.startswith("  fix:   ")
    assert "cannot be read" not in what  # raised by a check of opgraph or of onnx's checker, not by the last fallback


def test_constant_of_70_dimensions_is_refused_by_name() -> None:
    with pytest.raises(Unimplemented, match=r"it has 70 dimensions\n  where: initializer \"c\" of .*\n  fix: .* 64"):
        og.onnx.load(with_constant(dims=[1] * 69 + [4]))


def test_functions_that_inline_to_too_many_nodes_are_refused() -> None:
    with pytest.raises(Unimplemented, match=r"unfold to more than 50,740 nodes, from the 37 that it states"):
        og.onnx.load(bomb(18))
    assert len(og.onnx.load(bomb(9))) == 512


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_with_the_reason(name: str) -> None:
    made, word = REFUSED[name]
    with pytest.raises(Unimplemented, match=word):
        og.onnx.load(made)


def test_malformed_onnx_ir_models_are_refused() -> None:
    for name in ("undefined value", "two dtypes", "unknown op", "cycle"):
        with pytest.raises(ModelError):
            og.onnx.load(ir.from_proto(MALFORMED[name]))


def test_initializers_listed_as_inputs_of_ir3_models_are_constants() -> None:
    older = model(
        [helper.make_node("Add", ["x", "c"], ["y"])], inputs=[info("x"), info("c", [4])], initializer=[tensor()]
    )
    older.ir_version = 3
    assert [t.name for t in og.onnx.load(older).inputs] == ["x"]


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"not a model", bytes(range(256)) * 9, b"\x08\x0a\x3a\xff\xff\xff\xff\x0f"]
)
def test_files_without_a_model_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.onnx[\s\S]*fix:"):
        og.onnx.load(tmp_path / "m.onnx")


@pytest.mark.parametrize("place", ["producer", "graph", "node", "remark"])
def test_invalid_utf8_is_refused_in_every_field(place: str) -> None:
    made = model([relu(name="a node")], doc_string="a graph")
    made.producer_name, made.graph.node[0].doc_string = "a producer", "a text"
    made.graph.node[0].metadata_props.add(key="k", value="a remark")
    text = {"producer": b"a producer", "graph": b"a graph", "node": b"a text", "remark": b"a remark"}[place]
    broken = onnx.ModelProto.FromString(made.SerializeToString().replace(text, b"\xf3" + text[1:]))
    with pytest.raises(ModelError, match="no UTF-8 text"):
        og.onnx.load(broken)


def test_folders_missing_files_and_invalid_paths_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.onnx", str(tmp_path) + "/a\0b", "x" * 5000):
        with pytest.raises(ModelError):
            og.onnx.load(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = small_model().SerializeToString()
    for length in range(0, len(content), 7):
        (tmp_path / "m.onnx").write_bytes(content[:length])
        with pytest.raises(OpGraphError):
            og.onnx.load(tmp_path / "m.onnx")


def small_model() -> Any:
    branches = [
        helper.make_graph([helper.make_node(op, ["m", "c"], [op])], op, [], [info(op, None)]) for op in ("Add", "Sub")
    ]
    nodes = [
        call("f", "x", "m"),
        helper.make_node("Greater", ["k", "k"], ["cond"]),
        helper.make_node("If", ["cond"], ["q"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Clip", ["q", "low", ""], ["p"]),
        helper.make_node("MatMul", ["p", "w"], ["y"]),
    ]
    silu = function("f", [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])])
    constants = {"c": np.float32([2]), "low": np.float32(0), "w": np.eye(4, dtype=np.float32)}
    return model(nodes, inputs=[info("x"), info("k", [])], functions=(silu,),
                 initializer=[onnx.numpy_helper.from_array(a, n) for n, a in constants.items()])  # fmt: skip


def test_corrupted_bytes_raise_only_opgraph_errors(tmp_path: Path) -> None:
    from opgraph.onnx.save import to_model

    content, rng = small_model().SerializeToString(), random.Random(0)
    path, loaded = tmp_path / "m.onnx", 0
    for _ in range(1500):
        broken = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 5))):
            place = rng.randrange(len(broken))
            what = rng.randrange(4)
            if what == 0:
                broken[place] ^= 1 << rng.randrange(8)
            elif what == 1:
                broken[place] = rng.choice((0, 1, 127, 128, 255))
            elif what == 2:
                del broken[place : place + rng.randrange(1, 9)]
            else:
                broken[place:place] = rng.randbytes(rng.randrange(1, 9))
        path.write_bytes(broken)
        try:
            graph = og.onnx.load(path)
            loaded += 1
            to_model(graph, form=rng.choice(("auto", "decomposed", "contrib")), functions=rng.random() < 0.5)
            str(graph)
        except OpGraphError as error:
            assert len(str(error).splitlines()) == 3
    assert loaded > 50


def test_unusual_names_load_print_and_save() -> None:
    from opgraph.onnx.save import to_model

    for name in ('"', "a\nb", "*/", "#", "\u2028", "x" * 10_000, "int", "%0", "const", "a b", "\u202e", "ü"):
        made = model([relu("x", name, name), helper.make_node("Sigmoid", [name], ["y"], name=name + "2")])
        made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = name
        graph = og.onnx.load(made)
        assert og.parse(str(graph)) == graph
        assert og.onnx.load(to_model(graph)) == graph


# -- external data --------------------------------------------------------------------------------------------------


def external(folder: Path, location: str, *, offset: int = 0, length: int = 16, dims: int = 4, **more: str) -> Path:
    made = with_constant(dims=[dims])
    constant = made.graph.initializer[0]
    constant.ClearField("raw_data")
    constant.data_location = T.EXTERNAL
    for key, value in {"location": location, "offset": str(offset), "length": str(length), **more}.items():
        constant.external_data.add(key=key, value=value)
    folder.mkdir(exist_ok=True)
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    return folder / "m.onnx"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(bytes(64))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "data").write_bytes(np.float32([1, 2, 3, 4]).tobytes() * 2)
    return tmp_path


def test_external_data_is_memory_mapped_and_read_only(secret: Path) -> None:
    graph = og.onnx.load(external(secret / "in", "data", offset=16))
    (constant,) = graph.constants
    assert constant.data.tolist() == [1, 2, 3, 4]
    assert not constant.data.flags.writeable
    assert not constant.data.flags.owndata


@pytest.mark.parametrize(
    "location", ["../secret", "a/../../secret", "/etc/passwd", "", "nothing", ".", "C:\\x", "a\0b"]
)
def test_data_files_outside_the_models_folder_are_refused(secret: Path, location: str) -> None:
    with pytest.raises(ModelError):
        og.onnx.load(external(secret / "in", location))


def test_symlinks_out_of_the_folder_are_refused_and_inside_followed(secret: Path) -> None:
    folder = secret / "in"
    (folder / "out").symlink_to(secret / "secret")
    (folder / "up").symlink_to(secret)
    (folder / "near").symlink_to(folder / "data")
    for location in ("out", "up/secret"):
        with pytest.raises(ModelError, match="outside"):
            og.onnx.load(external(folder, location))
    assert og.onnx.load(external(folder, "near")).constants[0].data.tolist() == [1, 2, 3, 4]


def test_data_files_that_are_hard_links_or_pipes_are_refused(secret: Path) -> None:
    folder = secret / "in"
    os.link(secret / "secret", folder / "hard")
    os.mkfifo(folder / "pipe")
    for location in ("hard", "pipe"):
        with pytest.raises(ModelError):
            og.onnx.load(external(folder, location))


def test_symlinked_model_in_a_hub_cache_loads(secret: Path) -> None:
    store, snapshot = secret / "blobs", secret / "snapshots" / "main"
    store.mkdir()
    snapshot.mkdir(parents=True)
    external(secret / "in", "m.data").rename(store / "aaa")
    (store / "bbb").write_bytes(np.float32([4, 3, 2, 1]).tobytes())
    (snapshot / "m.onnx").symlink_to("../../blobs/aaa")
    (snapshot / "m.data").symlink_to("../../blobs/bbb")
    assert og.onnx.load(snapshot / "m.onnx").constants[0].data.tolist() == [4, 3, 2, 1]


def test_symlink_out_of_a_hub_cache_store_is_refused(secret: Path) -> None:
    store, snapshot = secret / "blobs", secret / "snapshots" / "main"
    store.mkdir()
    snapshot.mkdir(parents=True)
    external(secret / "in", "m.data").rename(store / "aaa")
    (snapshot / "m.onnx").symlink_to("../../blobs/aaa")
    for target in ("../../secret", str(secret / "secret"), "../../blobs/../secret"):
        (snapshot / "m.data").symlink_to(target)
        with pytest.raises(ModelError, match="outside the model's folder"):
            og.onnx.load(snapshot / "m.onnx")
        (snapshot / "m.data").unlink()
    os.link(secret / "secret", store / "hard")
    (snapshot / "m.data").symlink_to("../../blobs/hard")
    with pytest.raises(ModelError, match="hard links"):
        og.onnx.load(snapshot / "m.onnx")


@pytest.mark.parametrize(
    "fields", [{"offset": 24}, {"offset": 1 << 40}, {"offset": -4}, {"length": 12}, {"dims": 400, "length": 1600}]
)
def test_external_data_ranges_that_do_not_fit_are_refused(secret: Path, fields: dict[str, int]) -> None:
    with pytest.raises(ModelError):
        og.onnx.load(external(secret / "in", "data", **fields))


def test_non_numeric_external_data_offsets_are_refused(secret: Path) -> None:
    made = onnx.load(external(secret / "in", "data"), load_external_data=False)
    made.graph.initializer[0].external_data[1].value = "many"
    (secret / "in" / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ModelError):
        og.onnx.load(secret / "in" / "m.onnx")


def test_thousands_of_external_tensors_share_one_memory_map(secret: Path) -> None:
    count = 3000
    (secret / "in" / "big").write_bytes(np.arange(count * 4, dtype=np.float32).tobytes())
    nodes, constants = [], []
    for index in range(count):
        nodes.append(helper.make_node("Add", [f"v{index}" if index else "x", f"c{index}"], [f"v{index + 1}"]))
        constant = tensor(name=f"c{index}")
        constant.ClearField("raw_data")
        constant.data_location = T.EXTERNAL
        for key, value in (("location", "big"), ("offset", str(16 * index)), ("length", "16")):
            constant.external_data.add(key=key, value=value)
        constants.append(constant)
    made = model(nodes, outputs=[info(f"v{count}")], initializer=constants)
    (secret / "in" / "m.onnx").write_bytes(made.SerializeToString())
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    graph = og.onnx.load(secret / "in" / "m.onnx")
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after - before < 10
    assert graph.constants[-1].data[3] == count * 4 - 1


def test_huge_stated_input_sizes_allocate_nothing(secret: Path) -> None:
    size = 1 << 40
    made = model(
        [helper.make_node("Gather", ["big", "k"], ["g"]), helper.make_node("Add", ["x", "g"], ["y"])],
        inputs=[info("x"), info("k", [1], T.INT64), info("big", [size])],
    )
    graph = og.onnx.load(made)  # limited by the timeout of the test run, and by its memory
    assert graph.inputs[2].dims == (size,)
