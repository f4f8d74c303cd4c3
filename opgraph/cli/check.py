"""`opgraph check A [B]`: compares every device with the float64 reference, or file B with A."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opgraph.cli.agreement import foreign_of, port_of, same_dtype_foreign
from opgraph.cli.compare import Distance, distance, number, refuse_empty, whole_number
from opgraph.cli.feeds import feeding_arguments, feeds_for
from opgraph.cli.main import refuse_passed_over, usage
from opgraph.cli.models import load_model
from opgraph.cli.stages import first_wrong_stage, is_wrong
from opgraph.cli.terminal import Step, console, printable, progress, table
from opgraph.errors import DeviceError, OpGraphError
from opgraph.ir import dtypes
from opgraph.ir.graph import Graph
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.partition.partition import FUSED, LIBRARY, UNSUPPORTED, Partition, graph_of
from opgraph.partition.partitioner import partition
from opgraph.runtime.compile_graph import compile
from opgraph.runtime.compiled_partition import nobody_runs
from opgraph.runtime.engine import Engine, engine_of
from opgraph.runtime.reference import evaluate

#: The most rows of the table, which shows the tensors farthest from the truth.
MAX_ROWS = 12


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("model", metavar="A", help="an ONNX file, a oneDNN graph file or a text form")
    parser.add_argument("other", metavar="B", nargs="?", help="an ONNX file to compare with A in onnxruntime")
    feeding_arguments(parser)
    parser.add_argument("--ort-library", metavar="LIB.so", help="a library of custom ops that B needs or may use")
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: cpu, and cuda where there is a GPU)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.other:
        refuse_passed_over({"--device": args.device}, "two files are compared in onnxruntime, on the CPU")
        from opgraph.cli.check_files import check_files

        return check_files(args)
    refuse_passed_over({"--ort-library": args.ort_library}, "no B is given that would run with it")
    return _check_devices(args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor that a partition makes, or an output of the whole model, on a device.

    Attributes:
        where: "partition 3", or "whole model".
        kind: of the partition; "" for the whole model.
        off: the distance of the device from float64.
        peer: the distance of NumPy from float64, with the same formulas in the same dtype on the same inputs.
        stage: the first wrong stage; only for the first wrong tensor, if a fused partition made it.
    """

    where: str
    kind: str
    ops: str
    tensor: LogicalTensor
    off: Distance
    peer: Distance
    stage: str = ""

    @property
    def agrees(self) -> bool:
        """True if the device is near enough."""
        # Libraries may sum in any way, so half of the digits must agree; opgraph's kernels must meet the slack rule.
        if self.kind == LIBRARY and self.off.unequal is None:
            return self.off.has_half_the_digits(self.tensor.dtype)
        return self.off.is_within(self.peer)

    @property
    def distance(self) -> float:
        """The distance from float64, in the units of `told`."""
        return self.off.ulp if self.kind == FUSED else self.off.scaled

    @property
    def told(self) -> tuple[str, str]:
        """The two distances as text."""
        if self.kind == FUSED and self.off.count:
            return tuple(f"{number(d.absolute)} ({number(d.ulp)} ulp)" for d in (self.off, self.peer))  # type: ignore[return-value]
        return str(self.off), str(self.peer)


def _check_devices(args: argparse.Namespace) -> int:
    with progress() as step:
        step("reading the model")
        graph = load_model(args.model)
        ports = [port_of(t) for t in graph.inputs]
        feeds = feeds_for(args, ports)
        devices = [args.device] if args.device else _devices()
        with usage({"Engine": "--device"}):
            engines = [engine_of(device) for device in devices]
        cut = partition(graph).partitions
        for part in cut:
            if part.kind == UNSUPPORTED:
                raise nobody_runs(part)
        step("computing the truth in float64")
        truth: dict[int, np.ndarray] = {t.id: feeds[port_of(t).name] for t in graph.inputs}
        evaluate(graph, feeds, foreign=foreign_of(graph), watch=lambda t, a: truth.update({t.id: a}))
        results = {}
        for device, engine in zip(devices, engines, strict=True):
            results[device] = _partition_rows(cut, engine, truth, step)
            step(f"running the whole model on {device}")
            results[device] += _whole_rows(graph, engine, feeds, truth)
    for rows in results.values():
        refuse_empty((row.off for row in rows), args.model)
    bad = None
    for device, rows in results.items():
        wrong = [row for row in rows if not row.agrees]
        _print_rows(device, rows, wrong)
        bad = bad or next(((device, row) for row in wrong), None)
    if bad is not None:
        device, row = bad
        stage = row.stage or ("" if row.kind else _wrong_between(graph, cut, feeds, truth))
        if stage:
            console().print(f"first wrong stage: {stage}", soft_wrap=True)
        raise OpGraphError(
            f"the first tensor that differs on {device} is {printable(row.tensor.label, 80)}: {row.told[0]} from "
            f"float64, the same formulas in NumPy {row.told[1]}",
            where=f"{row.where} ({row.ops}), element {list(row.off.index)}: {whole_number(row.off.values[0])} "
            f"instead of {whole_number(row.off.values[1])}",
            fix="this is a bug of opgraph, or of the runtime that ran the partition: report it with the model",
        )
    return 0


def _devices() -> list[str]:
    try:
        Engine("cuda")
    except DeviceError:
        return ["cpu"]
    return ["cpu", "cuda"]


def _partition_rows(
    partitions: Sequence[Partition], engine: Engine, truth: Mapping[int, np.ndarray], step: Step
) -> list[Row]:
    """Runs each partition alone, on true inputs rounded to their dtypes, so that errors do not propagate."""
    rows: list[Row] = []
    for part in partitions:
        step(f"running partition {part.id + 1} of {len(partitions)} on {engine}")
        if not all(isinstance(truth[t.id], np.ndarray) for t in part.input_ports):
            continue  # a sequence, whose dtype no graph states: the run of the whole model covers it
        alone, feeds, exact, peer = _by_reference(part, truth)
        made = _all_outputs(alone, compile(alone, engine)({t: _on(engine, a) for t, a in feeds.items()}))
        ops = ", ".join(op.label for op in part.ops[:4]) + (" ..." if len(part.ops) > 4 else "")
        for tensor, array, want, other in zip(part.output_ports, made, exact, peer, strict=True):
            if tensor.dtype not in dtypes.BY_NAME:
                continue
            row = _row(f"partition {part.id}", part.kind, ops, tensor, (_as_numpy(array), want, other))
            if part.kind == FUSED and not row.agrees and all(before.agrees for before in rows):
                step(f"running each stage of partition {part.id + 1}")
                row = replace(row, stage=first_wrong_stage(part, feeds, exact, peer, engine.kind))
            rows.append(row)
    return rows


def _by_reference(
    part: Partition, truth: Mapping[int, np.ndarray]
) -> tuple[Graph, dict[int, np.ndarray], list[Any], list[Any]]:
    """A partition as a graph, its inputs, and its reference outputs in float64 and in their own dtypes."""
    alone = graph_of(part)
    feeds = {t.id: _rounded(truth[t.id], t) for t in part.input_ports}
    exact = _all_outputs(alone, evaluate(alone, feeds, foreign=foreign_of(alone)))
    return alone, feeds, exact, _all_outputs(alone, evaluate(alone, feeds, dtype=None, foreign=same_dtype_foreign))


def _wrong_between(
    graph: Graph, partitions: Sequence[Partition], feeds: Mapping[str, np.ndarray], truth: Mapping[int, np.ndarray]
) -> str:
    """The first wrong stage if the whole model is wrong although each partition alone computes its ops correctly."""
    peer: dict[int, np.ndarray] = {}
    evaluate(graph, feeds, dtype=None, foreign=same_dtype_foreign, watch=lambda t, a: peer.update({t.id: a}))
    for part in partitions:
        ids = [t.id for t in part.output_ports]
        if all(isinstance(truth[id], np.ndarray) for id in (*ids, *(t.id for t in part.input_ports))):
            exact = _by_reference(part, truth)[2]
            if is_wrong(part.output_ports, exact, [truth[id] for id in ids], [peer[id] for id in ids]):
                return f"partition {part.id}: its ops are not the graph's"
    return "run: each partition by itself is right, so look at what goes from one to the next"


def _whole_rows(
    graph: Graph, engine: Engine, feeds: Mapping[str, np.ndarray], truth: Mapping[int, np.ndarray]
) -> list[Row]:
    """Runs the compiled graph as a user would."""
    outputs = [t for t in graph.outputs if t.id in truth and t.dtype in dtypes.BY_NAME]
    given = {name: _on(engine, array) for name, array in feeds.items()}
    made = dict(zip(graph.outputs, _all_outputs(graph, compile(graph, engine)(given)), strict=True))
    peer = dict(
        zip(
            graph.outputs,
            _all_outputs(graph, evaluate(graph, feeds, dtype=None, foreign=same_dtype_foreign)),
            strict=True,
        )
    )
    return [_row("whole model", "", "all of it", t, (_as_numpy(made[t]), truth[t.id], peer[t])) for t in outputs]


def _row(
    where: str, kind: str, ops: str, tensor: LogicalTensor, values: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> Row:
    got, exact, peer = values
    if got.shape != np.shape(exact):
        raise OpGraphError(
            f"{tensor.label} has shape {got.shape} instead of {np.shape(exact)}", where=f"{where} ({ops})",
            fix="this is a bug of opgraph: report it with the model",
        )  # fmt: skip
    off, other = distance(got, exact, tensor.dtype), distance(np.asarray(peer), exact, tensor.dtype)
    return Row(where=where, kind=kind, ops=ops, tensor=tensor, off=off, peer=other)


def _all_outputs(graph: Graph, results: Any) -> list[Any]:
    found = list(results.values()) if isinstance(results, dict) else [results]
    assert len(found) == len(graph.outputs)
    return found


def _rounded(array: np.ndarray, tensor: LogicalTensor) -> np.ndarray:
    record = dtypes.BY_NAME.get(tensor.dtype)
    with np.errstate(over="ignore"):
        return array.astype(record.numpy) if record is not None and record.is_float else array


def _on(engine: Engine, array: np.ndarray) -> object:
    if engine.kind == "cpu":
        return array
    from opgraph.runtime import cuda

    return cuda.CUPY.from_host(array, engine.index)


def _as_numpy(array: object) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())  # type: ignore[attr-defined]


def _print_rows(device: str, rows: Sequence[Row], wrong: Sequence[Row]) -> None:
    out = console()
    shown = sorted(range(len(rows)), key=lambda i: (rows[i].agrees, bool(rows[i].kind), -rows[i].distance))[:MAX_ROWS]
    cells = []
    for row in (rows[i] for i in sorted(shown)):
        name = printable(row.tensor.name or str(row.tensor.id), 40)
        cells.append((row.where, row.kind, name, row.tensor.dtype, *row.told, "yes" if row.agrees else "NO"))
    columns = ("", "kind", "~tensor", "dtype", device, "NumPy, same dtype", "agrees")
    title = f"{device}: distance from float64" + (
        f"; the {MAX_ROWS} farthest of {len(rows)} tensors" if len(rows) > MAX_ROWS else ""
    )
    if not rows:
        out.print(f"{device}: nothing that can be compared comes out")
        return
    out.print(table(title, columns, cells, right=(device, "NumPy, same dtype")))
    verdict = f"{len(wrong)} of {len(rows)} tensors differ" if wrong else "agrees with the float64 reference"
    worst = max((row for row in rows if row.kind == FUSED), key=lambda row: row.off.ulp, default=None)
    if worst is not None:
        verdict += f"; the farthest of the kernels is off by {number(worst.off.ulp)} ulp, NumPy there by "
        verdict += f"{number(worst.peer.ulp)}"
    out.print(f"{device}: {verdict}")
    if any(row.kind != FUSED for row in rows):
        out.print("ulp: units in the last place, of each value for kernels, of the tensor's largest value otherwise")
