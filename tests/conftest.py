"""Fixtures of several test modules."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from emulator import FakeCupy

import opgraph as og
from opgraph.ir.stage_log import STAGES

#: Modules that keep a reference to the CuPy that they were imported with.
_MODULES = (
    "cuda", "cuda_arrays", "cuda_kernel", "cuda_exchange", "cuda_memory", "cuda_sequence", "providers.onnx_device",
    "providers.torch_partition",
)  # fmt: skip


#: Folders whose tests compile kernels of every op, dtype or layout, or run all graph files and benchmarks: most of
#: the whole suite's time.
_SWEEPS = ("accuracy", "bench", "codegen", "cuda", "onednn", "rows")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of some folders."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in _SWEEPS:
            item.add_marker(pytest.mark.sweep)


@pytest.fixture(autouse=True)
def seed_torch() -> None:
    """Seeds torch's own generator, so that a test that holds for most numbers only does not pass by luck."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def _modes() -> dict[str, object]:
    """The modes that torch computes under, if it is imported."""
    if "torch" not in sys.modules:
        return {}
    import torch

    return {
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def torch_modes_unchanged() -> Iterator[None]:
    """Fails a test that leaves torch's modes changed, such as gradients off; otherwise later tests would fail."""
    before = _modes()
    yield
    after = _modes()
    changed = {mode: after[mode] for mode in before if after[mode] != before[mode]}
    assert not changed, f"this test leaves torch changed: {changed}"


_tests = itertools.count()


@pytest.fixture(autouse=True)
def rare_garbage_collection() -> None:
    """Collects garbage rarely: every 25 tests the objects made since then, every 500 tests all objects.

    A collection of all that torch and other tests keep alive takes a second, and took a third of the time.
    """
    if (number := next(_tests)) % 25 == 0:
        if number % 500 == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()


class _Records(logging.Handler):
    """Keeps all log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def stage_records() -> Iterator[list[logging.LogRecord]]:
    """The records that the stages of opgraph have logged so far, while a test runs.

    pytest's own plugin for logs is off (pyproject.toml): its handlers make torch write down all that it compiles.
    """
    kept = _Records()
    loggers = [logging.getLogger(f"opgraph.{stage}") for stage in STAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.addHandler(kept)
    yield kept.records
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(kept)
        logger.setLevel(level)


@pytest.fixture
def interpreted_kernels() -> Iterator[None]:
    """Compiles nothing: captured graphs run the loops of their kernels op by op."""
    from opinfo_interpreted import interpreted  # needs torch

    with interpreted():
        yield


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[ModuleType]:
    """torch.distributed with a group of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Turns off the cache of compiled partitions."""
    before = og.onednn.get_compiled_partition_cache_capacity()
    og.onednn.set_compiled_partition_cache_capacity(0)
    yield
    og.onednn.set_compiled_partition_cache_capacity(before)


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    """CuPy replaced by host memory and emulated kernels. (tests/gpu has its own fixture, with a GPU.)"""

    def forget() -> None:
        for name in _MODULES:
            module = sys.modules.pop(f"opgraph.runtime.{name}", None)
            if module is not None and module.__package__ in sys.modules:
                sys.modules[module.__package__].__dict__.pop(name.rpartition(".")[2], None)
        capacity = og.onednn.get_compiled_partition_cache_capacity()
        og.onednn.set_compiled_partition_cache_capacity(0)  # a partition compiled for one GPU would launch on it
        og.onednn.set_compiled_partition_cache_capacity(capacity)

    before = sys.modules.get("cupy")
    forget()
    fake = sys.modules["cupy"] = FakeCupy()
    yield fake
    forget()
    sys.modules.pop("cupy")
    if before is not None:
        sys.modules["cupy"] = before
