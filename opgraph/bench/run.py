"""A whole run: the search for peers, then one suite after the other, within the time of the run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from opgraph.bench.case import require_gpu, require_gpu_still
from opgraph.bench.machine import machine, use_threads
from opgraph.bench.peers.peer import Peer
from opgraph.bench.peers.table import Found, look
from opgraph.bench.plan import COMPILER, Job, jobs, suites_of
from opgraph.bench.results import COLD, WARM, Results
from opgraph.errors import InvalidArguments, OpGraphError

#: Default seconds of `--quick`, and of a run of the GPU suites.
QUICK, GPU = 165.0, 420.0
#: The fractions of a run's time for suites other than those of entries.
_OTHERS = {"host": 0.06, "compile": 0.22, "scale": 0.08, "models": 0.12}
#: The approximate seconds of the suite of large graphs with its largest graph.
_ALL_OPS = 20.0
#: Models of `opgraph.onnx.samples`, and the size of their batch.
SAMPLES = {"efficientnet": 2, "llama": 2, "own_activation": 512, "gated_f16": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run. Empty tuples select the defaults of the plan (`opgraph.bench.plan.jobs`).

    Attributes:
        budget: seconds; None for no limit.
        threads: None for as many as torch, or the machine, has.
    """

    suites: tuple[str, ...] = ("all",)
    entries: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "cpu"
    quick: bool = False
    cache: str = ""
    peers: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    threads: int | None = None
    budget: float | None = None


def run(
    settings: Settings, say: Callable[[str], None] = lambda _: None, keep: Callable[[Results], None] = lambda _: None
) -> Results:
    """Runs the suites of the settings.

    Args:
        say: receives a description of the current step, and the remaining time.
        keep: receives the results so far after each suite and each row, for a run that may be interrupted.

    Raises:
        InvalidArguments: the settings name something that does not exist.
        DeviceError: the GPU was lost to this process; `keep` has received the results so far.
    """
    suites = suites_of(settings.suites)
    cache = settings.cache or (COLD if settings.device == "cuda" else WARM)
    if settings.device == "cuda":
        require_gpu()
    planned = jobs(
        suites,
        settings.entries,
        device=settings.device,
        quick=settings.quick,
        sizes=settings.sizes,
        types=settings.dtypes,
    )
    if "networks" in suites:  # a pattern without a match is reported before anything is measured
        from opgraph.bench.suites.networks import asked_for

        asked_for(settings.entries)
    say("looking for peers")
    found = look(settings.device, settings.peers, settings.without)
    if settings.peers and not any(f.version for f in found):
        raise InvalidArguments(
            f"there is nothing to measure beside: {'; '.join(f'{f.peer.name} {_absence(f)}' for f in found)}",
            where="--peers", fix="name a peer that `opgraph bench --list` finds",
        )  # fmt: skip
    threads = use_threads(settings.threads)
    results = Results(
        machine=machine(),
        settings={
            "device": settings.device,
            "suites": list(suites),
            "entries": list(settings.entries),
            "quick": settings.quick,
            "cache": cache,
            "threads": threads,
            "budget_s": settings.budget,
        },
        peers={f.peer.name: f.version for f in found if f.version},
        absent={f.peer.name: _absence(f) for f in found if not f.version},
        complete=False,
    )
    peers = [f.peer for f in found if f.version]
    _Run(settings, results, peers, threads, cache, say, keep).all(suites, planned)
    results.complete = True
    return results


def _absence(found: Found) -> str:
    """Why a peer is absent, and how to get it."""
    return f"{found.reason}; {found.get}" if found.get else found.reason


class _Run:
    """The suites of a run, one method each."""

    def __init__(
        self,
        settings: Settings,
        results: Results,
        peers: list[Peer],
        threads: int,
        cache: str,
        say: Callable[[str], None],
        keep: Callable[[Results], None],
    ) -> None:
        self._settings = settings
        self._keep = keep
        self._results = results
        self._peers = peers
        self._threads = threads
        self._cache = cache
        self._begun = time.perf_counter()
        self._tell = say

    def _left(self) -> float | None:
        if self._settings.budget is None:
            return None
        return max(self._settings.budget - (time.perf_counter() - self._begun), 0.0)

    def _say(self, what: str) -> None:
        left = self._left()
        self._tell(what if left is None else f"{left:3.0f} s left, {what}")

    @property
    def _compiles(self) -> bool:
        return any(p.name == COMPILER for p in self._peers)

    def _share(self, suite: str, otherwise: float) -> float:
        budget = self._settings.budget
        return otherwise if budget is None else max(_OTHERS[suite] * budget, 1.0)

    def all(self, suites: tuple[str, ...], planned: list[Job]) -> None:
        """Runs every suite. Those with a share of the time run first: entries use the remaining time."""
        for suite, measure in (
            ("host", self._host),
            ("compile", self._compile),
            ("scale", self._scale),
            ("models", self._models),
            ("networks", self._networks),
        ):
            if suite in suites:
                try:
                    measure()
                except (OpGraphError, RuntimeError) as error:
                    self._results.absent[f"suite {suite}"] = " ".join(str(error).split())[:300]
                self._keep(self._results)
        if planned:
            self._entries(planned)

    def _entries(self, planned: list[Job]) -> None:
        from opgraph.bench.suites.entries import Budget, row_of

        caches = (WARM, COLD) if self._cache == "both" else (self._cache,)
        budget = Budget(self._left(), len(planned) * len(caches))
        for index, job in enumerate(planned):
            for cache in caches:
                label = f"{index + 1}/{len(planned)} {job.entry.name}, {job.direction}, {job.size:,} {job.dtype}"
                row = row_of(
                    job,
                    self._peers,
                    self._settings.device,
                    self._threads,
                    cache,
                    budget,
                    lambda what, label=label: self._say(f"{label}: {what}"),  # type: ignore[misc]
                )
                self._results.rows.append(row)
                self._keep(self._results)
                if self._settings.device == "cuda":
                    require_gpu_still(label)

    def _host(self) -> None:
        from opgraph.bench.suites import host

        peers = [p for p in self._peers if p.name != COMPILER or not self._settings.quick]
        self._results.figures += host.measured(
            peers, self._settings.device, self._threads, self._share("host", 10.0), lambda w: self._say(f"host: {w}")
        )

    def _compile(self) -> None:
        from opgraph.bench.suites import latency

        seconds = None if self._settings.budget is None else self._share("compile", 0.0)
        self._results.figures += latency.measured(
            self._settings.device,
            self._threads,
            quick=self._settings.quick,
            with_torch=self._compiles,
            seconds=seconds,
            say=lambda w: self._say(f"compile: {w}"),
        )

    def _scale(self) -> None:
        from opgraph.bench.suites import scale

        quick = self._settings.quick or self._share("scale", _ALL_OPS) < _ALL_OPS
        self._results.figures += scale.measured(quick=quick, say=lambda w: self._say(f"scale: {w}"))

    def _models(self) -> None:
        from opgraph.bench.suites import models

        share = self._share("models", 30.0) / (len(SAMPLES) + 2)
        if "onnxruntime" in self._results.peers:
            self._samples(share)
        if "torch eager" in self._results.peers:
            self._results.rows += models.of_networks(
                quick=self._settings.quick,
                compiles=self._compiles and not self._settings.quick,
                budget=share,
                say=lambda w: self._say(f"models: {w}"),
            )

    def _networks(self) -> None:
        from opgraph.bench.suites import networks

        networks.measured(
            networks.asked_for(self._settings.entries),
            self._results,
            device=self._settings.device,
            threads=self._threads,
            compiles=self._compiles,
            left=self._left,
            say=lambda w: self._say(f"networks: {w}"),
            keep=self._keep,
        )

    def _samples(self, share: float) -> None:
        import opgraph as og
        from opgraph.bench.suites import models
        from opgraph.onnx import samples

        with tempfile.TemporaryDirectory(prefix="opgraph-bench-") as folder:
            for name, batch in SAMPLES.items():
                path = Path(folder) / f"{name}.onnx"
                samples.write(getattr(samples, name)(), path)
                graph = og.onnx.load(path)
                feeds = {t.name or "": models.drawn(t, {"batch": batch, "seq": 64}) for t in graph.inputs}
                row = models.of_graph(
                    name,
                    graph,
                    feeds,
                    model=str(path),
                    threads=self._threads,
                    budget=share,
                    say=lambda what, name=name: self._say(f"models: {name}: {what}"),  # type: ignore[misc]
                )
                self._results.rows.append(row)
