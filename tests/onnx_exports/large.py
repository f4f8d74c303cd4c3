"""Large models: what reading and writing them costs. The weights are holes in a sparse file, so this is cheap to run.

python tests/onnx_exports/large.py [--gib 2.2] [--nodes 20000]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import opgraph as og

_ROW = 1 << 20


def sparse_model(folder: Path, gib: float) -> Path:
    """A model of Gather and Add over one weight for every half GiB, all of them in one data file that holds nothing."""
    folder.mkdir(exist_ok=True)
    rows = max(1, int(gib * (1 << 30)) // (4 * _ROW))
    per = max(1, min(rows, 128))
    sizes = [per] * (rows // per) + ([rows % per] if rows % per else [])
    nodes, tensors, offset, last = [], [], 0, "x"
    for index, size in enumerate(sizes):
        tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[size, _ROW])
        tensor.data_location = TensorProto.EXTERNAL
        length = 4 * size * _ROW
        for key, value in (("location", "w.data"), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
        offset += length
        nodes.append(helper.make_node("Gather", [f"w{index}", "k"], [f"g{index}"], axis=0))
        nodes.append(helper.make_node("Add", [last, f"g{index}"], [f"a{index}"]))
        last = f"a{index}"
    with open(folder / "w.data", "wb") as file:
        file.truncate(offset)
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, [1, _ROW]), info("k", TensorProto.INT64, [1])]
    graph = helper.make_graph(nodes, "large", inputs, [info(last, TensorProto.FLOAT, [1, _ROW])], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


def chain(count: int) -> onnx.ModelProto:
    """A model of so many nodes: swishes, sums and one MatMul among every twenty."""
    nodes: list[Any] = []
    last = "x"
    for index in range(count):
        name = f"v{index}"
        if index % 20 == 19:
            nodes.append(helper.make_node("MatMul", [last, "w"], [name], name=f"n{index}"))
        elif index % 3 == 0:
            nodes.append(helper.make_node("Sigmoid", [last], [name], name=f"n{index}"))
        else:
            nodes.append(helper.make_node("Mul", [last, nodes[-1].input[0]], [name], name=f"n{index}"))
        last = name
    info = helper.make_tensor_value_info
    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "long", [info("x", TensorProto.FLOAT, ["n", 4])],
                              [info(last, TensorProto.FLOAT, ["n", 4])], [weight])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def memory() -> int:
    """The memory of this process in bytes, pages of files that were touched included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024


def measured(what: str, work: Callable[[], Any]) -> Any:
    """Prints what some work takes; returns what it returns."""
    before, started = memory(), time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    print(f"{what:50} {seconds:8.2f} s {(memory() - before) / 2**20:9.1f} MiB more", flush=True)
    return result


def main() -> int:
    """Runs everything once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.2)
    parser.add_argument("--nodes", type=int, default=20_000)
    given = parser.parse_args()
    og.onnx.load(chain(10))  # what is imported is imported
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = sparse_model(folder / "in", given.gib)
        graph = measured(f"load {given.gib} GiB", lambda: og.onnx.load(path))
        measured("partition it", graph.get_partitions)
        measured("save it beside its data", lambda: og.onnx.save(graph, folder / "in" / "again.onnx"))
        measured("save it elsewhere, data and all", lambda: og.onnx.save(graph, folder / "out.onnx"))
        measured("load what was saved", lambda: og.onnx.load(folder / "out.onnx"))
    model = chain(given.nodes)
    graph = measured(f"load {given.nodes} nodes", lambda: og.onnx.load(model))
    measured("partition them", graph.get_partitions)
    measured("save them", lambda: og.onnx.save(graph, Path(tempfile.gettempdir()) / "long.onnx"))
    (Path(tempfile.gettempdir()) / "long.onnx").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
