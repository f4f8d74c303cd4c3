"""The CPU engine's environment: compiler, disk cache, threads, and machines that lack one of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opgraph as og
from opgraph.runtime import build_library, cache, cpu_compiler

PROGRAM = """
import numpy as np, opgraph as og
g = og.parse("graph(x: f32[?]) -> (y)\\n  y = Sigmoid(x)")
print(float(og.compile(g)(x=np.zeros(3, np.float32))[0]))
"""


def run(code: str = PROGRAM, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, "CXX": "", **env}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "opgraph"


def entries(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.suffix == ".so"]


def test_kernel_is_compiled_once_and_loaded_from_the_cache(tmp_path: Path, folder: Path) -> None:
    assert run(XDG_CACHE_HOME=str(tmp_path)).stdout.strip() == "0.5"
    (entry,) = entries(folder)
    before = entry.stat().st_mtime_ns
    assert run(XDG_CACHE_HOME=str(tmp_path)).stdout.strip() == "0.5"
    assert entry.stat().st_mtime_ns == before
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    assert {p.suffix for p in folder.iterdir()} == {".so", ".version"}  # and no partly written files


def test_concurrent_threads_compile_a_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of different sizes may need the same text at once."""
    begun: list[str] = []
    compiled = cpu_compiler._compiled

    def slowly(source: Any, *rest: Any) -> bytes:
        begun.append(source.entry)
        time.sleep(0.3)
        return compiled(source, *rest)

    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_compiler, "_loaded", {})
    monkeypatch.setattr(cpu_compiler, "_compiled", slowly)
    graphs = [og.parse(f"graph(x: f32[{size}]) -> (y)\n  y = Sinh(x)") for size in (64, 128)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda graph: og.compile(graph)(x=np.zeros(graph.inputs[0].dims, np.float32)), graphs))
    assert [r.shape for r in results] == [(64,), (128,)]
    assert len(begun) == 1


def test_a_relative_cache_folder_is_ignored(tmp_path: Path) -> None:
    """This follows the XDG Base Directory Specification: no kernels are stored in or loaded from the current folder."""
    code = f"import os; os.chdir({str(tmp_path)!r}); from opgraph.runtime import cache; print(cache.folder())"
    done = run(code, XDG_CACHE_HOME="here", HOME=str(tmp_path / "home"))
    assert done.stdout.strip() == str(tmp_path / "home" / ".cache" / "opgraph"), done.stderr


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "garbage", "of an older version"])
def test_damaged_cache_entry_is_rebuilt(tmp_path: Path, folder: Path, damage: str) -> None:
    run(XDG_CACHE_HOME=str(tmp_path))
    (entry,) = entries(folder)
    good = entry.read_bytes()
    flipped = good[:2000] + bytes([good[2000] ^ 255]) + good[2001:]
    body = good[: -len(cache._MAGIC) - 32]
    older = body + b"opgraph-entry-0\0" + hashlib.sha256(body).digest()
    damaged = {"truncated": good[:-500], "flipped": flipped, "empty": b"", "garbage": b"#!/bin/sh\n" * 99}
    entry.write_bytes({**damaged, "of an older version": older}[damage])
    (folder / "what another version keeps here").write_text("")
    done = run(XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.strip() == "0.5", done.stderr
    assert entry.read_bytes() == good


def test_processes_may_compile_the_same_kernel_concurrently(tmp_path: Path, folder: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)
    ]
    assert [p.communicate(timeout=300)[0].strip() for p in both] == ["0.5"] * 3
    assert len(entries(folder)) == 1 and {p.suffix for p in folder.iterdir()} == {".so", ".version"}


def test_cache_folder_writable_by_others_is_not_used(tmp_path: Path, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    done = run(XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.strip() == "0.5"
    assert "others may write to it" in done.stderr
    assert not list(folder.iterdir())


def test_unusable_cache_folder_only_warns(tmp_path: Path) -> None:
    (tmp_path / "opgraph").write_text("")
    done = run(XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.strip() == "0.5"
    assert "cannot be used" in done.stderr


def test_full_disk_in_the_cache_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    real = os.replace

    def full(source: object, target: object) -> None:
        if Path(str(target)).parent == tmp_path:
            raise OSError(28, "No space left on device")
        real(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        path = cache.store("entry", b"content")
    assert path.read_bytes().startswith(b"content")
    assert not list(tmp_path.iterdir())


def test_full_disk_is_not_reported_as_compiler_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a full folder it can write neither its files nor its messages."""
    monkeypatch.setattr(cpu_compiler, "_loaded", {})
    monkeypatch.setattr(cache, "find", lambda name: None)
    monkeypatch.setattr(build_library, "built", lambda *_: build_library.Built(None, ""))
    graph = og.parse("graph(x: f32[4]) -> (y)\n  y = Sinh(x)")
    with pytest.raises(og.errors.DeviceError, match="refused kernel"):
        og.compile(graph)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=65536))
    with pytest.raises(og.errors.DeviceError, match="cannot be kept or loaded: No space left") as caught:
        og.compile(graph)
    assert "make room" in caught.value.fix


def test_unwritable_disk_raises_device_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_compiler, "_loaded", {})
    monkeypatch.setattr(os, "replace", full)
    graph = og.parse("graph(x: f32[4]) -> (y)\n  y = Sinh(x)")
    with (
        pytest.warns(UserWarning, match="No space left"),
        pytest.raises(og.errors.DeviceError, match="cannot be kept") as caught,
    ):
        og.compile(graph)
    assert str(tmp_path) in caught.value.where and "make room" in caught.value.fix
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert og.compile(graph)(x=np.zeros(4, np.float32)).tolist() == [0] * 4  # the cache holds no partial state


def test_full_disk_during_compilation_raises_device_error(tmp_path: Path) -> None:
    """Simulates a full disk: the compiler itself fails and reports the reason."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n" + PROGRAM
    done = run(limited, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1 and "DeviceError" in done.stderr and "fix:" in done.stderr


def test_cache_key_covers_source_flags_compiler_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(cpu_compiler.disk, "key", lambda *parts: seen.append(parts) or "0" * 32)
    monkeypatch.setattr(cpu_compiler, "_loaded", {})
    with pytest.raises(og.errors.DeviceError):
        monkeypatch.setattr(
            cpu_compiler, "_compiled", lambda *_: (_ for _ in ()).throw(og.errors.DeviceError("no", where="x", fix="y"))
        )
        og.compile(og.parse("graph(x: f32[4]) -> (y)\n  y = Exp(x)"))
    source, flags, compiler, cpu = seen[0]
    assert "struct Fused" in source and "-march=native" in flags and len(cpu) > 100
    assert cpu_compiler.find_compiler().identity == compiler


def program(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


CLANG = "Apple clang version 16.0.0 (clang-1600.0.26.6)"


def test_gcc_is_recognised_by_its_version_text(tmp_path: Path) -> None:
    """g++ and c++ may be clang, which does not support all of GCC's flags."""
    for name in "g++", "c++":
        program(tmp_path / name, f"echo '{CLANG}'; echo asked >> {tmp_path}/log")
    told = """
from opgraph.runtime import cpu_compiler
c = cpu_compiler.find_compiler()
flags = c.flags(flat=True, branches=True)
print(c.command[0], c.is_gcc, cpu_compiler.has_lanes(), any("vect-cost-model" in f for f in flags))
"""
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        assert run(told, **env).stdout.split() == [str(tmp_path / "g++"), "False", "False", "False"]
    assert (tmp_path / "log").read_text() == "asked\n"  # only once: the answer is stored with the compiler's identity


def test_compiler_in_cxx_variable_comes_first(tmp_path: Path) -> None:
    own, wrapper = tmp_path / "own", tmp_path / "wrapper"
    program(own, 'exec c++ "$@"')
    program(wrapper, 'exec "$@"')
    told = "from opgraph.runtime import cpu_compiler; print(*cpu_compiler.find_compiler().command)"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    for given, command in ((str(own), [str(own)]), ("wrapper own", [str(wrapper), "own"])):
        assert run(told, CXX=given, **env).stdout.split() == command
        assert run(PROGRAM, CXX=given, **env).stdout.strip() == "0.5"
    assert run(told, CXX="missing -x", **env).stdout == run(told, CXX="", **env).stdout


def test_broken_compiler_is_skipped_and_named_if_it_is_the_only_one(tmp_path: Path) -> None:
    """Example: the g++ of a Mac without its developer tools."""
    program(tmp_path / "g++", "echo 'xcode-select: no developer tools were found' >&2; exit 1")
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = run("import sys; sys.modules['ziglang'] = None\n" + without("") + PROGRAM, **env)
    said = f"there is no C++ compiler; {tmp_path}/g++: xcode-select: no developer tools were found: fused partitions"
    assert done.stdout.strip() == "0.5" and said in done.stderr
    compiler = shutil.which("c++")
    assert compiler is not None
    (tmp_path / "c++").symlink_to(compiler)
    found = run("from opgraph.runtime import cpu_compiler; print(cpu_compiler.find_compiler().command)", **env)
    assert found.stdout.strip() == repr((str(tmp_path / "c++"),))


def test_compiler_error_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    from opgraph.codegen import emitter

    monkeypatch.setattr(emitter.Emitter, "expression", lambda self, s: "og::no_such_function()")
    monkeypatch.setattr(cpu_compiler, "_loaded", {})
    g = og.Graph()
    g.add_op("Sinh", g.input("x", shape=(4,)), name="the culprit")
    with pytest.raises(og.errors.DeviceError, match="no_such_function") as caught:
        og.compile(g)
    assert 'Sinh "the culprit"' in caught.value.where
    assert caught.value.what.startswith(cpu_compiler.find_compiler().version.splitlines()[0])
    # The log, and the line that it refers to, with its number and its op.
    shown = next(line for line in str(caught.value).splitlines() if "<-" in line).split()
    assert shown[0].isdigit() and "og::no_such_function();" in shown and shown[-1] == 'culprit"'


NO_COMPILER = "import shutil; shutil.which = lambda *a, **k: None\nimport sys; sys.modules['ziglang'] = None\n"


def without(module: str) -> str:
    return f"""
import importlib.util as u
real = u.find_spec
u.find_spec = lambda name, *rest: None if name in ("ziglang", {module!r}) else real(name, *rest)
"""


def test_torch_runs_the_partition_without_a_compiler() -> None:
    pytest.importorskip("torch")
    done = run(NO_COMPILER + without("") + PROGRAM)
    assert done.stdout.strip() == "0.5", done.stderr
    assert done.stderr.count("run op by op in torch") == 1 and "opgraph[compiler]" in done.stderr


def test_torch_without_a_compiler_ignores_its_default_device() -> None:
    pytest.importorskip("torch")
    halved = """
import numpy as np, opgraph as og, torch
torch.set_default_device("meta")
print(og.compile(og.parse("graph(x: f32[?]) -> (y)\\n  y = Multiply(x, 0.5)"))(x=np.ones(1, np.float32)))
"""
    done = run(NO_COMPILER + without("") + halved)
    assert done.stdout.strip() == "[0.5]", done.stderr


def test_a_compiler_with_a_relative_path_runs_in_any_folder(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    (tmp_path / "own++").symlink_to(compiler)
    code = (
        f"""
import os, numpy as np, opgraph as og
os.chdir({str(tmp_path)!r})
from opgraph.runtime import cpu_compiler
assert cpu_compiler.find_compiler() is not None
os.chdir("/")
"""
        + PROGRAM
    )
    done = run(code, CXX="./own++", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.stdout.strip() == "0.5", done.stderr


def test_numpy_runs_the_partition_without_compiler_and_torch() -> None:
    done = run(NO_COMPILER + without("torch") + PROGRAM)
    assert done.stdout.strip() == "0.5", done.stderr
    assert done.stderr.count("run op by op in NumPy") == 1


@pytest.mark.parametrize("order", ["torch first", "opgraph first"])
def test_one_openmp_runtime_serves_torch_and_kernels(order: str) -> None:
    pytest.importorskip("torch")
    code = """
import re, numpy as np, opgraph as og
from opgraph.runtime import threads
f = og.compile(og.parse("graph(x: f32[?]) -> (y)\\n  y = Sigmoid(x)"))
x = np.zeros(1 << 20, np.float32); f(x=x)
import torch
torch.set_num_threads(1); (torch.zeros(1 << 20) + 1).sum()
f(x=x)
maps = open("/proc/self/maps").read()
loaded = set(re.findall(r"/\\S*libgomp\\S*$", maps, re.MULTILINE))
print(threads.team(1 << 20)[0], len(loaded))
"""
    done = run(("import torch\n" if order == "torch first" else "") + code)
    assert done.stdout.strip() == "1 1", done.stderr


def test_without_openmp_python_threads_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from opgraph.runtime import threads

    f = og.compile(og.parse("graph(x: f32[?,1003], a: f32[1003]) -> (y)\n  %0 = Add(x, a)\n  y = Sigmoid(%0)"))
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((999, 1003), np.float32), "a": rng.standard_normal(1003, np.float32)}
    wanted = f(feeds)
    pieces: list[int] = []
    real = threads.run_in_pool
    monkeypatch.setattr(
        threads, "run_in_pool", lambda work, size, count: (pieces.append(count), real(work, size, count))
    )
    monkeypatch.setattr(threads, "team", lambda size: (3, None))
    np.testing.assert_array_equal(f(feeds), wanted)
    assert pieces == [3]


def test_small_calls_stay_on_one_thread() -> None:
    from opgraph.runtime import threads

    assert threads.team(1024) == (1, None)


@pytest.mark.parametrize(("dtype", "widens"), [("f16", ("vcvtph2ps",)), ("bf16", ("vpmovzxwd", "vpermw"))])
def test_16_bit_conversions_are_vectorized(dtype: str, widens: tuple[str, ...], tmp_path: Path) -> None:
    cpu = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    if shutil.which("objdump") is None or " f16c" not in cpu or " avx2" not in cpu:
        pytest.skip("needs objdump, and a CPU with AVX2 and F16C")
    text = f"graph(x: {dtype}[?]) -> (y)\\n  s = Sigmoid(x)\\n  y = Multiply(x, s)"
    done = run(f'import opgraph as og; og.compile(og.parse("{text}"))', XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (entry,) = entries(tmp_path / "opgraph")
    code = subprocess.run(["objdump", "-d", str(entry)], capture_output=True, text=True, check=True).stdout
    vectors = [line for line in code.splitlines() if "ymm" in line or "zmm" in line]
    assert any(name in line for name in widens for line in vectors)


@pytest.mark.parametrize("shape", [(3, 37, 300), (1, 16, 129), (2, 33, 128), (5, 1, 500), (40, 257)])
@pytest.mark.parametrize("pieces", [1, 3])  # of the space: they may begin and end inside a row
def test_transposed_operands_in_tiles_agree_with_numpy(
    shape: tuple[int, ...], pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opgraph.runtime import threads

    monkeypatch.setattr(threads, "team", lambda size: (pieces, None))
    rng = np.random.default_rng(len(shape))
    g = og.Graph()
    x, w, c = (g.input(n, shape=(None,) * len(shape)) for n in "xwc")
    g.output(g.add_op("Add", g.add_op("Multiply", x, w), c, name="y"))
    f = og.compile(g)
    a, b = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[::-1]).astype(np.float32).T
    column = rng.normal(size=(*shape[:-1], 1)).astype(np.float32)
    want = a * b + column
    np.testing.assert_array_equal(f(x=a, w=b, c=column), want)
    turned = np.full(shape[::-1], np.nan, np.float32).T
    f(x=a, w=b, c=column, out=turned)
    np.testing.assert_array_equal(turned, want)
