"""oneDNN's graph files, read and written: the graph equals the file, and is written back unchanged."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onednn_files import NAMES, REFUSED, RUNNABLE, content_of, graph_of, needs_files, path_of

import opgraph as og
from opgraph.cli import main
from opgraph.errors import InvalidArguments, InvalidGraphOp, InvalidShape, ModelError, OpGraphError, Unimplemented
from opgraph.ir.opdef import all_ops
from opgraph.onednn.document import UNKNOWN
from opgraph.onednn.entries import ENGINE_OF, is_onednn, op_entry
from opgraph.onednn.record import FileRecord
from opgraph.onednn.repair import repaired

#: Files whose scales are moved to another axis.
REPAIRED = {"pattern/int8/int8_convtranspose_post_ops_add_fusion.json"}
SCHEMA = path_of("..").resolve() / "onednn-opschema.json"


def tensor(id: int, shape: Any = (4, 8), **fields: Any) -> dict[str, Any]:
    known = UNKNOWN not in shape
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))] if known else [UNKNOWN]
    entry = {"id": id, "dtype": "f32", "shape": list(shape), "stride": stride}
    return {**entry, "layout_type": "strided", "property_type": "undef", **fields}


def op(id: int, kind: str, inputs: list[Any], outputs: list[Any], **attrs: tuple[str, Any]) -> dict[str, Any]:
    given = {name: {"type": type_, "value": value} for name, (type_, value) in attrs.items()}
    return {"id": id, "name": f"op{id}", "kind": kind, "attrs": given, "inputs": inputs, "outputs": outputs}


def document(*ops: dict[str, Any], **head: Any) -> dict[str, Any]:
    return {"version": "3.14.0", "engine_kind": "cpu", "fpmath_mode": "strict", **head, "graph": list(ops)}


def written(folder: Path, content: Any) -> Path:
    path = folder / "graph.json"
    path.write_text(json.dumps(content))
    return path


def loaded(folder: Path, *ops: dict[str, Any], **head: Any) -> og.Graph:
    return og.onednn.load(written(folder, document(*ops, **head)))


def dumped(folder: Path, graph: og.Graph) -> Any:
    og.onednn.dump(graph, folder / "dump.json")
    return json.loads((folder / "dump.json").read_text())


# -- oneDNN's own files ---------------------------------------------------------------------------------------------


@needs_files
def test_corpus_has_215_files() -> None:
    assert len(NAMES) == 215 and set(NAMES) >= REFUSED


@needs_files
@pytest.mark.parametrize("name", RUNNABLE)
def test_dump_writes_the_loaded_file_unchanged(name: str, tmp_path: Path) -> None:
    assert dumped(tmp_path, og.onednn.load(path_of(name))) == content_of(name)


@needs_files
@pytest.mark.parametrize("name", RUNNABLE)
def test_loaded_graph_equals_the_file(name: str) -> None:
    """Apart from the record, the graph's ops, tensors and attributes are those of the file."""
    content, graph = content_of(name), graph_of(name)
    ops = {o.id: o for o in graph.ops}
    assert len(ops) == len(content["graph"])
    repairs, _ = repaired(content["graph"])
    assert len(repairs) == (name in REPAIRED)
    for entry in content["graph"]:
        found = ops[entry["id"]]
        assert found.kind == entry["kind"]
        for mention, t in zip(entry["inputs"] + entry["outputs"], (*found.inputs, *found.outputs), strict=True):
            assert (t.id, t.name, t.dtype) == (mention["id"], f"t{mention['id']}", mention["dtype"])
            assert (t.layout, t.property) == (mention["layout_type"], mention["property_type"])
            if UNKNOWN not in mention["shape"]:
                assert list(t.shape) == mention["shape"]
            if t.layout == "strided" and UNKNOWN not in mention["stride"]:
                assert list(t.get_strides()) == mention["stride"]
        for attr, given in entry.get("attrs", {}).items() if entry["id"] not in repairs else ():
            value = given["value"]
            np.testing.assert_array_equal(np.asarray(found.attr(attr)), _as_read(given["type"], value))


def _as_read(type_: str, value: Any) -> Any:
    return np.asarray(value, np.float32) if type_.startswith("f32") else np.asarray(value)


@needs_files
def test_source_record_beside_the_graph_is_small() -> None:
    """Most ops are written from the graph alone, so the record is no copy of the file."""
    kept = sum(len(graph_of(n).source.entries) for n in RUNNABLE)  # type: ignore[union-attr]
    assert kept < 0.25 * sum(len(graph_of(n)) for n in RUNNABLE)


@needs_files
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_negative_pads_are_refused(name: str) -> None:
    with pytest.raises(InvalidGraphOp, match="pads") as caught:
        og.onednn.load(path_of(name))
    assert name in caught.value.where and "AvgPool" in caught.value.where


@needs_files
def test_onednn_kinds_equal_its_schemas() -> None:
    kinds = {schema["kind"] for schema in json.loads(SCHEMA.read_text())}
    assert {record.kind for record in all_ops() if is_onednn(record)} == kinds


# -- valid contents of files ----------------------------------------------------------------------------------------


def test_a_file_is_a_graph_of_named_tensors(tmp_path: Path) -> None:
    sigmoid = op(100, "Sigmoid", [tensor(0)], [tensor(1)])
    multiply = op(101, "Multiply", [tensor(0), tensor(1)], [tensor(2)], auto_broadcast=("string", "numpy"))
    g = loaded(tmp_path, sigmoid, multiply, input_ports=[0, 0], output_ports=[2])
    assert g.is_finalized and g.engine == "cpu" and g.explain().partitions[0].units == ("swish",)
    assert [t.name for t in g.inputs] == ["t0"] and [t.name for t in g.outputs] == ["t2"]
    x = np.linspace(-3, 3, 32, dtype=np.float32).reshape(4, 8)
    np.testing.assert_allclose(og.compile(g)(t0=x), x / (1 + np.exp(-x)), rtol=1e-6)


@pytest.mark.parametrize(("word", "kind"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_engine_kind_gpu_is_cuda(word: str, kind: str, tmp_path: Path) -> None:
    g = loaded(tmp_path, op(0, "Abs", [tensor(0)], [tensor(1)]), engine_kind=word)
    assert g.engine == kind and dumped(tmp_path, g)["engine_kind"] == word
    other = {"cpu": "cuda", "cuda": "cpu"}[kind]
    moved = og.onednn.load(tmp_path / "graph.json", engine=other)
    assert moved.engine == other and ENGINE_OF[dumped(tmp_path, moved)["engine_kind"]] == other


def test_smallest_integer_is_read_as_unknown_size(tmp_path: Path) -> None:
    entry = op(0, "Abs", [tensor(0, (UNKNOWN,))], [tensor(1, (UNKNOWN,))])
    g = loaded(tmp_path, entry, op(1, "Exp", [tensor(2, (4, UNKNOWN))], [tensor(3, (4, UNKNOWN))]))
    assert [t.dims for t in g.inputs] == [None, (4, None)]
    assert dumped(tmp_path, g)["graph"][0] == entry
    for shape in ((3,), (2, 5)):
        assert og.compile(g)({"t0": np.ones(shape, np.float32), "t2": np.ones((4, 2), np.float32)})["t1"].shape == shape


def test_unknown_shapes_are_inferred_and_written_back_unknown(tmp_path: Path) -> None:
    entry = op(0, "Abs", [tensor(0)], [tensor(1, (UNKNOWN,))])
    g = loaded(tmp_path, entry)
    assert g.outputs[0].dims == (4, 8) and dumped(tmp_path, g)["graph"] == [entry]


@pytest.mark.parametrize("layout", ["any", "undef", "opaque"])
def test_layouts_without_strides_are_kept(layout: str, tmp_path: Path) -> None:
    entry = op(0, "Abs", [tensor(0)], [tensor(1, layout_type=layout, stride=[UNKNOWN])])
    g = loaded(tmp_path, entry)
    assert g.outputs[0].layout == layout and dumped(tmp_path, g)["graph"] == [entry]


def test_strides_that_are_not_row_major_are_kept(tmp_path: Path) -> None:
    entry = op(0, "Abs", [tensor(0, stride=[1, 4])], [tensor(1)])
    g = loaded(tmp_path, entry)
    assert g.inputs[0].strides == (1, 4) and dumped(tmp_path, g)["graph"] == [entry]


def test_host_scalars_and_constants_are_inputs_with_a_property(tmp_path: Path) -> None:
    entry = op(0, "Add", [tensor(0), tensor(1, (), property_type="host_scalar")], [tensor(2)])
    other = op(1, "Add", [tensor(2), tensor(3, property_type="constant")], [tensor(4)])
    g = loaded(tmp_path, entry, other)
    assert [t.property for t in g.inputs] == ["undef", "host_scalar", "constant"] and g.constants == ()
    assert dumped(tmp_path, g)["graph"] == [entry, other]


def test_bools_are_zero_and_one(tmp_path: Path) -> None:
    entry = op(0, "ReLUBackward", [tensor(0), tensor(1)], [tensor(2)], use_dst=("bool", 0))
    g = loaded(tmp_path, entry)
    assert g.ops[0].attr("use_dst") is False and dumped(tmp_path, g)["graph"] == [entry]


@pytest.mark.parametrize("alpha", [0.1, 1, 1e-7, 16777217.0, 0.123456789, 3.4028235e38, -0.0])
def test_floats_are_written_exactly(alpha: float, tmp_path: Path) -> None:
    entry = op(0, "Elu", [tensor(0)], [tensor(1)], alpha=("f32", alpha))
    g = loaded(tmp_path, entry)
    assert dumped(tmp_path, g)["graph"] == [entry]
    g.source = None  # as if it had been built by calls
    again = dumped(tmp_path, g)["graph"][0]["attrs"]["alpha"]["value"]
    assert np.float32(again).tobytes() == np.float32(alpha).tobytes()
    assert len(repr(again)) <= len(repr(float(np.float32(alpha))))


def test_order_of_ops_in_the_file_is_kept(tmp_path: Path) -> None:
    entries = [op(1, "Exp", [tensor(1)], [tensor(2)]), op(0, "Abs", [tensor(0)], [tensor(1)])]
    g = loaded(tmp_path, *entries)
    assert [o.id for o in g.ops] == [0, 1] and dumped(tmp_path, g)["graph"] == entries


def test_op_without_attrs_is_written_without_attrs(tmp_path: Path) -> None:
    entry = op(0, "Abs", [tensor(0)], [tensor(1)])
    del entry["attrs"]
    assert dumped(tmp_path, loaded(tmp_path, entry))["graph"] == [entry]


def test_partition_marks_of_a_dump_are_kept_and_ignored(tmp_path: Path) -> None:
    entry = op(0, "Abs", [tensor(0)], [tensor(1)], partition_id=("string", "3"), backend=("string", "dnnl_backend"))
    g = loaded(tmp_path, entry)
    assert g.ops[0].attrs == {} and dumped(tmp_path, g)["graph"] == [entry]


@pytest.mark.parametrize("mode", ["bf16", "f16", "tf32", "any"])
def test_file_with_fpmath_mode_is_computed_as_strict(mode: str, tmp_path: Path) -> None:
    """Strict arithmetic is allowed in every mode: the results are those of the strict graph, bit for bit."""
    ops = [
        op(0, "MatMul", [tensor(0, (64, 96)), tensor(1, (96, 32))], [tensor(2, (64, 32))]),
        op(1, "Sigmoid", [tensor(2, (64, 32))], [tensor(3, (64, 32))]),
    ]
    head = {"fpmath_mode": mode, "fpmath_mode_apply_to_int": "true"}
    g = loaded(tmp_path, *ops, **head)
    assert f"fpmath mode {mode} " in str(g.explain()) and g.fpmath == "strict"
    again = dumped(tmp_path, g)
    assert again == document(*ops, **head) and list(again) == list(document(*ops, **head))
    feeds = {f"t{i}": np.random.default_rng(i).standard_normal(g.inputs[i].shape).astype(np.float32) for i in (0, 1)}
    strict = loaded(tmp_path, *ops)
    assert "fpmath" not in str(strict.explain())
    np.testing.assert_array_equal(og.compile(g)(feeds), og.compile(strict)(feeds))


@needs_files
def test_files_with_other_fpmath_modes_have_a_note() -> None:
    modes = {name: content_of(name).get("fpmath_mode", "strict") for name in RUNNABLE}
    others = {name: mode for name, mode in modes.items() if mode != "strict"}
    assert len(others) == 11 and set(others.values()) == {"bf16", "f16", "tf32", "any"}
    for name in RUNNABLE:
        said = [note for note in graph_of(name).notes if note.startswith("fpmath mode")]
        assert len(said) == (name in others) and all(others[name] in note for note in said)


def test_scales_of_grouped_weights_are_moved_to_the_group_axis(tmp_path: Path) -> None:
    """One scale for each group, along an axis of size 1, as in oneDNN's own int8_convtranspose_post_ops_add_fusion."""
    given = {"axis": ("s64", 1), "qtype": ("string", "per_channel"), "zps": ("s64[]", [0] * 4)}
    scales = [0.5, 1.0, 2.0, 4.0]
    weights = op(0, "Dequantize", [tensor(0, (8, 1, 3, 3), dtype="s8")], [tensor(1, (8, 1, 3, 3))],
                 **given, scales=("f32[]", scales))  # fmt: skip
    window = {name: ("s64[]", [1, 1]) for name in ("strides", "dilations", "pads_begin", "pads_end")}
    conv = op(1, "ConvTranspose", [tensor(2, (2, 8, 5, 5)), tensor(1, (8, 1, 3, 3))], [tensor(3, (2, 4, 5, 5))],
              **window, groups=("s64", 4), data_format=("string", "NCX"), weights_format=("string", "IOX"))  # fmt: skip
    g = loaded(tmp_path, weights, conv)
    assert g.ops[0].attr("axis") == 0 and g.ops[0].attr("scales") == (0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)
    assert "taken along axis 0" in str(g.explain())
    assert dumped(tmp_path, g)["graph"] == [weights, conv]
    with pytest.raises(InvalidShape, match="4 scales"):
        loaded(tmp_path, weights)
    conv["attrs"]["groups"]["value"] = 2
    with pytest.raises(OpGraphError):
        loaded(tmp_path, weights, conv)


@pytest.mark.parametrize("name", ["", "naïve", 'a"b', "two\nlines", "\ud800", "x" * 1000])
def test_op_names_are_kept_and_shown_on_one_line(name: str, tmp_path: Path) -> None:
    entry = {**op(0, "Abs", [tensor(0)], [tensor(1)]), "name": name}
    g = loaded(tmp_path, entry)
    assert len(g.ops[0].label.splitlines()) == 1
    assert dumped(tmp_path, g)["graph"] == [entry]


# -- graphs of other origins ----------------------------------------------------------------------------------------


def test_built_graph_is_written_and_read_back(tmp_path: Path) -> None:
    g = og.Graph()
    x = g.input("x", shape=(None, 8))
    y = g.add_op("Multiply", x, g.add_op("Sigmoid", x))
    g.output(y)
    g.add_op("Elu", y, alpha=0.1)
    content = dumped(tmp_path, g)
    assert content["input_ports"] == [0, 0] and content["output_ports"] == [2, 3]
    assert [entry["kind"] for entry in content["graph"]] == ["Sigmoid", "Multiply", "Elu", "End"]
    back = og.onednn.load(tmp_path / "dump.json")
    assert isinstance(back.source, FileRecord) and back.source.entries == {}
    assert [t.dims for t in back.outputs] == [(None, 8), (None, 8)] and len(back.outputs) == 2
    x_value = np.linspace(-2, 2, 16, dtype=np.float32).reshape(2, 8)
    for ours, theirs in zip(og.compile(g)(x=x_value).values(), og.compile(back)(t0=x_value).values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["Sigmoid", "SigmoidBackward"])
def test_opgraphs_extra_attributes_are_omitted_at_their_defaults(kind: str, tmp_path: Path) -> None:
    graph = _with(lambda g, x: g.add_op(kind, *[x] * (1 + (kind != "Sigmoid")), alpha=1.0))
    assert "alpha" not in dumped(tmp_path, graph)["graph"][0]["attrs"]


@needs_files
def test_written_attributes_are_those_of_onednns_schema() -> None:
    """Checks the ops of all files and of their gradients."""
    schemas = {s["kind"]: s for s in json.loads(SCHEMA.read_text())}
    written_kinds: set[str] = set()
    for name in RUNNABLE:
        graphs = [graph_of(name)]
        wrt = [t.name for t in graphs[0].inputs if t.dtype == "f32"]
        with suppress(OpGraphError):  # no gradient exists
            graphs += [og.gradient(graphs[0], wrt=wrt)] if wrt else []
        for o in (o for g in graphs for o in g.ops):
            try:
                entry = op_entry(o)
            except Unimplemented:
                continue
            written_kinds.add(o.kind)
            known = {a[0] for a in schemas[o.kind]["attributes"]} | {"qtype", "zps"}
            assert set(entry["attrs"]) <= known, (name, o.kind)
            required = {a[0] for a in schemas[o.kind]["attributes"] if a[1] == "req"}
            assert required <= set(entry["attrs"]), (name, o.kind)
    assert len(written_kinds) > 70


def test_wildcard_keeps_the_attributes_of_its_file(tmp_path: Path) -> None:
    """oneDNN's schema has none, but another writer's file may."""
    mention = {"dtype": "f32", "shape": [4], "stride": [1], "layout_type": "strided", "property_type": "undef"}
    attrs = {"axis": {"type": "s64", "value": 1}, "partition_id": {"type": "string", "value": "0"}}
    wildcard = {"id": 0, "name": "w", "kind": "Wildcard", "attrs": attrs}
    wildcard |= {"inputs": [{"id": 0, **mention}], "outputs": [{"id": 1, **mention}]}
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"engine_kind": "cpu", "graph": [wildcard]}))
    assert dumped(tmp_path, graph := og.onednn.load(path))["graph"] == [wildcard]
    assert graph.ops[0].attrs == {"axis": 1}


def _with(build: Any) -> og.Graph:
    g = og.Graph()
    build(g, g.input("x", shape=(4,)))
    return g


@pytest.mark.parametrize("is_read", [True, False])
def test_input_that_is_also_an_output_keeps_its_place(is_read: bool, tmp_path: Path) -> None:
    """An unused one used to be lost with its output; the output of a used one used to come last."""
    g = og.Graph()
    x, z = g.input("x", shape=(4,)), g.input("z", shape=(5,))
    y = g.add_op("Abs", x)
    g.output(x if is_read else z, y)
    content = dumped(tmp_path, g)
    back = og.onednn.load(tmp_path / "dump.json")
    assert [t.id for t in back.outputs] == [t.id for t in g.outputs] and not back.notes
    assert dumped(tmp_path, back) == content


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda g, x: g.add_op("Swish", x), "kind Swish"),
        (lambda g, x: g.add_op("Sigmoid", x, alpha=2.0), "Sigmoid with alpha"),
        (lambda g, x: g.add_op("SigmoidBackward", x, x, alpha=2.0), "SigmoidBackward with alpha"),
        (lambda g, x: g.add_op("Clamp", x, g.input("z", shape=()), max=1.0), "the input low of Clamp"),
        (lambda g, x: g.add_op("Clamp", x, max=1.0), "Clamp without min"),
        (lambda g, x: g.add_op("Pow", x, x), "the input exponent of Pow"),
        (lambda g, x: g.add_op("Add", *[g.input("z", dtype="s64", shape=(4,))] * 2), "s64 as src_0 of Add"),
        (lambda g, x: g.add_op("TypeCast", x, dtype="f32"), "this TypeCast"),
        (lambda g, x: g.add_op("Concat", *[x] * 65, axis=0), "Concat of 65 inputs"),
        (lambda g, x: g.add_op("Wildcard", x, dtype="f32", axis=1), "this Wildcard: oneDNN's takes none"),
        (
            lambda g, x: g.add_op(
                "GroupNorm", g.input("z", shape=(2, 5, 3)), groups=0, use_affine=False, keep_stats=False
            ),
            "this GroupNorm: each channel is a group",
        ),
        (lambda g, x: g.add_op("Add", x, 1.5), "data of constants"),
        (lambda g, x: g.add_op("Abs", g.input("z", dtype="f64", shape=(2,))), "dtype f64"),
        (lambda g, x: g.add_op("Clamp", x, min=0.0, max=math.inf), "number inf"),
        (lambda g, x: g.set_outputs([g.add_op("Abs", x), g.add_op("Exp", x)][:1]), "nobody reads"),
        (lambda g, x: g.add_op("Abs", g.input("z", shape=(1,) * 13)), "a tensor of 13 dimensions"),
        (lambda g, x: g.add_op(og.Op(2**64, "Abs", [x], [og.LogicalTensor(9, "f32", (4,))])), "the id 184467"),
        (lambda g, x: g.add_op(og.Op(9, "Abs", [x], [og.LogicalTensor(2**64, "f32", (4,))])), "the id 184467"),
    ],
    ids=(
        *("kind", "attribute", "attribute backward", "bound", "no bound", "exponent", "integers", "cast to itself"),
        *("65", "wildcard", "0 groups", "constant", "dtype", "infinity", "dropped value"),
        *("13 dimensions", "id of an op", "id of a tensor"),
    ),
)
def test_graphs_that_onednn_cannot_express_are_refused_without_a_write(build: Any, what: str, tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text("as it was")
    with pytest.raises(Unimplemented, match=what):
        og.onednn.dump(_with(build), tmp_path / "dump.json")
    assert [p.name for p in tmp_path.iterdir()] == ["dump.json"]
    assert (tmp_path / "dump.json").read_text() == "as it was"


@pytest.mark.parametrize("name", ["no_such_folder/x.json", ".", "a\0b"], ids=("folder", "is a folder", "null byte"))
def test_unwritable_path_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArguments, match="cannot be written"):
        og.onednn.dump(_with(lambda g, x: g.add_op("Abs", x)), f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing.json", ".", "a\0b"], ids=("missing", "folder", "null byte"))
def test_unreadable_path_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        og.onednn.load(f"{tmp_path}/{name}")


# -- the command line -----------------------------------------------------------------------------------------------


def test_show_and_check_commands_accept_graph_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sigmoid = op(100, "Sigmoid", [tensor(0)], [tensor(1)])
    multiply = op(101, "Multiply", [tensor(0), tensor(1)], [tensor(2)])
    path = written(tmp_path, document(sigmoid, multiply, fpmath_mode="bf16"))
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "1 fused; units: 1 swish" in shown and "in   t0: f32[4,8]" in shown and "note: fpmath mode bf16" in shown
    assert main(["check", str(path), "--device", "cpu"]) == 0
    assert "agrees with the float64 reference" in capsys.readouterr().out
