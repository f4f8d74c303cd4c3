"""Installed packages: a wheel and an editable install both find the kernel sources, and neither owns `kernels`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Runs in the fresh environment: prints the folder of the sources, checks a kernel, prints the owner of `kernels`.
PROBE = """
import importlib.util, pathlib
import numpy as np, opgraph as og
from opgraph.codegen.sources import kernel_folder
g = og.Graph()
x = g.input("x", shape=(None,))
g.add_op("Multiply", x, g.add_op("Sigmoid", x), name="y")
f = og.compile(g)
assert abs(f(x=np.ones(3, np.float32))[0] - 0.7310586) < 1e-6
print(pathlib.Path(og.__file__).resolve().parent)
print(kernel_folder().resolve())
print(importlib.util.find_spec("kernels"))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = pip(sys.executable, "wheel", "--no-deps", "-w", str(folder), str(ROOT))
    if done.returncode != 0 and ("hatchling" in done.stderr or "ConnectionError" in done.stderr):
        pytest.skip("pip cannot fetch the build backend: no package index within reach")
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("opgraph-*.whl")
    return made


def pip(python: str | Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def fresh_environment(folder: Path) -> Path:
    """An empty environment with this one's packages, except opgraph: pip's downloads are available already."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("opgraph", "_editable", "__")) and not (site / package.name).exists():
            (site / package.name).symlink_to(package)
    return python


def probe(python: Path, cwd: Path) -> list[str]:
    command = [str(python), "-P", "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:3]


@pytest.mark.slow
def test_wheel_contains_only_the_package_and_kernel_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(n).decode() for n in names if n.endswith("METADATA"))
        entry_points = next(archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"opgraph", next(t for t in tops if t.endswith(".dist-info"))}
    kernels = ROOT / "kernels"
    sources = {str(p.relative_to(kernels)) for p in kernels.rglob("*") if p.is_file()}
    assert {n.removeprefix("opgraph/_kernels/") for n in names if n.startswith("opgraph/_kernels/")} == sources
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "opgraph").rglob("*.py")}
    assert modules <= set(names) and "opgraph/py.typed" in names
    assert "opgraph = opgraph.cli:main" in entry_points
    assert "License-File: LICENSE" in metadata and "Requires-Python: >=3.11" in metadata


@pytest.mark.slow
def test_an_installed_wheel_runs_from_its_own_sources(wheel: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "env")
    done = pip(python, "install", "--no-deps", "--ignore-installed", str(wheel))
    assert done.returncode == 0, done.stderr
    package, kernels, owner = probe(python, tmp_path)
    assert Path(package).is_relative_to(tmp_path) and Path(kernels) == Path(package) / "_kernels"
    assert owner == "None"
    script = subprocess.run(
        [str(python.with_name("opgraph")), "ops"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert script.returncode == 0 and "Swish" in script.stdout


@pytest.mark.slow
def test_an_editable_install_runs_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "env")
    # The package that hatchling's editable installs import; pip would install it along with the other dependencies.
    done = pip(python, "install", "--no-deps", "--ignore-installed", "editables", "-e", str(ROOT))
    if done.returncode != 0 and ("editables" in done.stderr or "hatchling" in done.stderr):
        pytest.skip("pip cannot fetch the build backend: no package index within reach")
    assert done.returncode == 0, done.stderr
    package, kernels, owner = probe(python, tmp_path)
    assert Path(package) == ROOT / "opgraph" and Path(kernels) == ROOT / "kernels"
    assert owner == "None"


def test_every_extra_named_in_an_error_exists() -> None:
    """Each extra that an error message names exists."""
    import re
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {m for p in (ROOT / "opgraph").rglob("*.py") for m in re.findall(r"opgraph\[([\w,-]+)\]", p.read_text())}
    assert named and {extra for group in named for extra in group.split(",")} <= set(extras)


CARRIED = """graph(x: f32[2]) -> (y)
  e = Exp(x)
  y: f32[2] = Wildcard(e, onnx_op=\"Erf\", onnx_domain=\"\", onnx_opset=20)
"""

#: Statements that need a package that a core install lacks, and the extra that contains it.
WITHOUT = {
    "evaluate": ("og.evaluate(g, x=x)", "ort"),
    "compile": ("og.compile(g)(x=x)", "ort"),
    "opgraph.onnx": ("og.onnx", "onnx"),
    "opgraph.torch": ("import opgraph.torch", "torch"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_core_install_raises_import_error_naming_the_extra(name: str) -> None:
    call, extra = WITHOUT[name]
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("onnx", "onnx_ir", "onnxruntime", "torch")))
import inspect
import numpy as np
import opgraph as og
g, x = og.parse({CARRIED!r}), np.ones(2, np.float32)
assert "onnx" not in dir(og) and len(inspect.getmembers(og)) > 20
try:
    {call}
except ImportError as error:
    assert isinstance(error, og.errors.OpGraphError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == [f"  fix:   pip install 'opgraph[{extra}]'"]
