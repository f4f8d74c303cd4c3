"""Fused calls on two processes: sharded tensors, and gradients that ranks share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

from two_ranks import CHECKS  # noqa: E402

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def said(tmp_path_factory: Any) -> list[str]:
    """The output of both ranks for every check; they run once for all tests."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    script = ROOT / "tests" / "support" / "two_ranks.py"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(meeting)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("check", CHECKS, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def test_two_ranks_agree_with_one_process(said: list[str], check: str) -> None:
    for text in said:
        assert f"{check}: right" in text, text
