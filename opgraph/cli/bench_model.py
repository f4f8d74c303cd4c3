"""`opgraph bench MODEL`: measures one model in every way to run it on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from opgraph.bench.machine import machine, use_threads
from opgraph.bench.peers.table import look
from opgraph.bench.results import Results
from opgraph.bench.suites import models
from opgraph.cli.feeds import Port, feeds_for
from opgraph.cli.main import UsageError, check_place
from opgraph.cli.models import ONNX, files_of, form_of, load_model
from opgraph.cli.terminal import progress


def of_model(args: argparse.Namespace) -> Results:
    """Measures the model of the command's arguments, on the CPU."""
    if args.device != "cpu":
        raise UsageError("models are measured on the CPU", where="--device", fix="leave it out")
    with progress() as step:
        step("reading the model")
        graph = load_model(args.model)
        if args.json is not None:
            check_place(args.json, "--json", reads=files_of(graph))
        ports = [Port(t.name or f"t{t.id}", t.dtype, t.dims) for t in graph.inputs]
        feeds = feeds_for(args, ports)
        step("looking for peers")
        found = [f for f in look("cpu") if f.peer.name in ("onnxruntime", "oneDNN")]
        threads = use_threads(args.threads)
        results = Results(
            machine=machine(),
            settings={"model": Path(args.model).name, "threads": threads, "device": "cpu"},
            peers={f.peer.name: f.version for f in found if f.version},
            absent={f.peer.name: f"{f.reason}; {f.peer.get}" for f in found if not f.version},
        )
        results.rows.append(
            models.of_graph(
                Path(args.model).name,
                graph,
                feeds,
                model=args.model if form_of(args.model) == ONNX else None,
                threads=threads,
                budget=args.budget or 5.0,
                say=step,
            )
        )
    return results
