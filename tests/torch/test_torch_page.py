"""specs/torch.md: its example runs, and the names and files in it exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import opgraph.torch as ogt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "specs" / "torch.md").read_text()


@pytest.mark.slow
def test_example_on_the_torch_page_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert " kernels\n" in done.stdout
    if torch.__version__ < "2.13":  # its Dynamo ends a graph where a module holds a fused function
        assert "graph breaks\n" in done.stdout
    else:
        assert "a library op" in done.stdout


def test_every_name_and_file_on_the_page_exists() -> None:
    for name in set(re.findall(r"\bogt\.(\w+)", PAGE)):
        assert hasattr(ogt, name), name
    for path in set(re.findall(r"`(?:python )?((?:tests|opgraph|specs)/[\w./]+)`", PAGE)):
        assert (ROOT / path).exists(), path


def test_quoted_why_rerun_of_naf1_is_current() -> None:
    from opgraph.torch.naf1 import NAF1

    fused = ogt.fuse(NAF1().forward)
    fused(torch.ones(3))
    assert f"`{fused.why_rerun}`" in PAGE
