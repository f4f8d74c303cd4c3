"""The public names and their signatures: any change of them is visible in this file."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import opgraph as og

NAMES = [
    "Graph", "LogicalTensor", "Op", "parse", "Partition", "CompiledPartition", "Engine", "Executable", "Stream",
    "compile", "evaluate", "gradient", "errors", "ops",
]  # fmt: skip

SIGNATURES = {
    "Graph": "(engine)",
    "Graph.input": "(name, dtype='f32', shape=())",
    "Graph.constant": "(name, value, dtype=None)",
    "Graph.add_op": "(op, /, *inputs, name='', dtype=None, outputs=None, **attrs)",
    "Graph.output": "(*tensors)",
    "Graph.set_outputs": "(tensors)",
    "Graph.finalize": "()",
    "Graph.get_partitions": "(policy='fusion', *, disable=())",
    "Graph.explain": "(policy='fusion', *, disable=())",
    "Graph.tensor": "(id)",
    "Graph.producer": "(id)",
    "Graph.consumers": "(id)",
    "LogicalTensor": "(id, dtype, dims, layout='strided', property='variable', strides=None, name=None, data=None)",
    "LogicalTensor.get_dims": "()",
    "LogicalTensor.get_strides": "()",
    "LogicalTensor.is_equal": "(other)",
    "LogicalTensor.with_": "(**changes)",
    "Op": "(id, kind, inputs=(), outputs=(), name='')",
    "Op.add_input": "(tensor)",
    "Op.add_inputs": "(tensors)",
    "Op.add_output": "(tensor)",
    "Op.add_outputs": "(tensors)",
    "Op.set_attr": "(name, value)",
    "Op.attr": "(name)",
    "parse": "(text, constants=None)",
    "Partition.of": "(op, engine='cpu')",
    "Partition.compile": "(inputs, outputs, engine)",
    "CompiledPartition.query_logical_tensor": "(id)",
    "CompiledPartition.inplace_ports": "()",
    "CompiledPartition.execute": "(stream, inputs, outputs)",
    "Engine": "(kind='cpu', index=0)",
    "Stream": "(engine, handle=None)",
    "Stream.wait": "()",
    "compile": "(graph, device='cpu', *, donate=(), rounding='store', wrt=None)",
    "gradient": "(graph, wrt)",
    "Executable.__call__": "(feeds=None, /, *, out=None, **named)",
    "Executable.bind": "(feeds=None, /, *, out, **named)",
}
SIGNATURES["Graph"] = "(engine='cpu', fpmath='strict')"

PROPERTIES = {
    "Graph": ["constants", "inputs", "is_finalized", "ops", "outputs"],
    "LogicalTensor": ["has_known_shape", "is_constant", "is_scalar_constant", "label", "mem_size", "ndim",
                      "odd_strides", "shape", "type_text"],
    "Op": ["attrs", "inputs", "label", "outputs", "where"],
    "Partition": ["supported", "units"],
    "CompiledPartition": ["kernels"],
    "Executable": ["engines", "kernels", "partitions", "spins"],
}  # fmt: skip


def found(path: str) -> Any:
    value: Any = og
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_public_names_are_the_listed_ones() -> None:
    assert og.__all__ == NAMES
    assert set(NAMES) < set(dir(og)) and "onnx" in dir(og)


@pytest.mark.parametrize("path", SIGNATURES)
def test_public_signatures_are_the_listed_ones(path: str) -> None:
    signature = inspect.signature(found(path))
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    assert str(inspect.Signature(parameters)) == SIGNATURES[path]


@pytest.mark.parametrize("cls", PROPERTIES)
def test_public_properties_are_the_listed_ones(cls: str) -> None:
    names = [n for n, v in inspect.getmembers(getattr(og, cls)) if isinstance(v, property) and not n.startswith("_")]
    assert sorted(names) == PROPERTIES[cls]


@pytest.mark.parametrize("path", [n for n in NAMES if n not in ("errors", "ops")] + list(SIGNATURES))
def test_everything_public_is_documented_and_typed(path: str) -> None:
    value = found(path)
    assert inspect.getdoc(value), path
    function = value.__init__ if inspect.isclass(value) else value
    hints = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    assert all(p.annotation is not p.empty for p in hints), path


def test_unknown_name_raises_attribute_error() -> None:
    assert not hasattr(og, "no_such_name")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = og.no_such_name


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_star_import_gives_public_names_without_extras() -> None:
    code = "from opgraph import *; import sys; print(Graph().finalize(), compile.__module__, 'onnx' in sys.modules)"
    assert run(code) == "graph() -> () opgraph.runtime.compile_graph False"


def test_import_loads_no_module_and_first_use_only_what_it_needs() -> None:
    """This keeps the import short for code that builds, reads or prints graphs, and the command line obeys Ctrl-C."""
    code = "import sys, opgraph; print([m.removeprefix('opgraph.') for m in sys.modules if m.startswith('opgraph.')])"
    assert run(code).strip() == "[]"
    loaded = run(code.replace("opgraph;", "opgraph; opgraph.parse('graph(x: f32[2]) -> (y)\\n y = Abs(x)');"))
    assert "'ir.graph'" in loaded and "'ops.arithmetic'" in loaded
    for later in ("runtime", "codegen", "partition.partitioner", "onnx", "cli"):
        assert f"'{later}'" not in loaded
    used = run(code.replace("opgraph;", "opgraph; opgraph.compile;"))
    for needed in ("runtime.cpu_compiler", "codegen.kernel", "partition.partitioner"):
        assert f"'{needed}'" in used
    for rare in ("onnx", "cli", "runtime.cuda", "runtime.reference", "partition.report"):
        assert f"'{rare}'" not in used


def test_package_docstring_example_runs() -> None:
    assert og.__doc__ is not None
    code = "import numpy as np\narray = np.zeros((2, 4096), np.float32)\n" + og.__doc__.split("\n\n", 1)[1]
    run(code)
