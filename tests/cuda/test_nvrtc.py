"""Every kernel compiles for every supported GPU, with the options that CuPy receives. No GPU is needed for that."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nvrtc
import pytest
from nvrtc import together
from one_op import POINTWISE, OneOp, calls
from schedules import pointwise

import opgraph as og
from opgraph.codegen.kernel import KernelSource, cuda_source
from opgraph.ir.logical_tensor import row_major
from opgraph.ir.opdef import OpDef
from opgraph.loops.layout import Layout, Variant, bind
from opgraph.loops.loop import Loop
from opgraph.loops.lower import Lowered, lower
from opgraph.partition.rules import RULES
from opgraph.partition.units import Rule
from opgraph.runtime.nvrtc_errors import refused
from opgraph.schedule.schedule import POINTWISE as ONE_BY_ONE
from opgraph.schedule.schedule import CudaPointwise

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is missing: pip install nvidia-cuda-nvrtc")


def lowered(graph: og.Graph) -> Lowered:
    (partition,) = graph.finalize().get_partitions()
    return lower(partition)


def dense(loop: Loop, *shapes: tuple[int, ...]) -> KernelSource:
    layout = bind(loop, shapes, [row_major(s) for s in shapes])
    return cuda_source(pointwise(loop, layout))


def small(loop: Loop) -> KernelSource:
    """A kernel of only the arithmetic: one element for each thread, which compiles fastest."""
    operands = "c" * (len(loop.loads) + len(loop.stores))
    layout = Layout((), (), (), (), Variant(operands, True))
    return cuda_source(
        CudaPointwise(name=ONE_BY_ONE, loop=loop, layout=layout, vector=1, unroll=1, narrow=False, group=0, tile=256)
    )


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("record", POINTWISE, ids=lambda r: r.kind)
def test_every_op_compiles_in_every_dtype(record: OpDef, arch: str) -> None:
    def source(call: OneOp) -> KernelSource:
        return small(lowered(call.graph(call.shapes((4, 8)))).loop)

    sources = [source(call) for call in calls(record)]
    cubin = nvrtc.compile_text(together(sources), arch, nvrtc.OPTIONS)
    assert all(s.entry.encode() in cubin for s in sources)


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("rule", RULES, ids=[f"{i}-{r.name}" for i, r in enumerate(RULES)])
def test_every_rule_compiles(rule: Rule, arch: str) -> None:
    graph = og.parse(rule.takes)
    loop = lowered(graph).loop
    shapes = [tuple(t.shape) for t in lowered(graph).loads if t is not None]
    nvrtc.compile_text(dense(loop, *shapes).code, arch, nvrtc.OPTIONS)


def three(dtype: str) -> Loop:
    g = og.Graph()
    x, a, b = (g.input(n, dtype=dtype, shape=None) for n in "xab")
    g.output(g.add_op("Add", g.add_op("Swish", x, a), b, name="y"))
    return lowered(g).loop


LAYOUTS = {
    "flat": ([(4096,)] * 3, None),
    "scalar and row": ([(64, 96), (), (96,)], None),
    "channel": ([(4, 8, 16, 16), (8, 1, 1), (4, 1, 1, 1)], None),
    "strided": ([(64, 96)] * 3, [(192, 2), (96, 1), (1, 64)]),
    "odd": ([(63, 95), (95,), ()], None),
}


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_every_layout_compiles(dtype: str, arch: str) -> None:
    loop, sources = three(dtype), []
    for shapes, strides in LAYOUTS.values():
        layout = bind(loop, shapes, strides or [row_major(s) for s in shapes])
        sources += [cuda_source(pointwise(loop, layout, a)) for a in (16, 4)]
    nvrtc.compile_text(together(sources), arch, nvrtc.OPTIONS)


def test_nvrtc_test_options_equal_the_engines() -> None:
    """cuda.py cannot be imported without CuPy, so its text is read."""
    import opgraph.runtime

    (folder,) = opgraph.runtime.__path__
    text = (Path(folder) / "cuda.py").read_text(encoding="utf-8")
    (written,) = re.findall(r"^OPTIONS = \((.*)\)$", text, re.MULTILINE)
    given = re.findall(r'"([^"]+)"', written)
    assert given == [o for o in nvrtc.OPTIONS if o not in nvrtc.ADDED_BY_CUPY]


# -- the text is a pure value ----------------------------------------------------------------------------------------

SWISH = """\
struct Fused {
  static constexpr int operands = 2;
  const float* x0;
  float* y0;
  OG_FN void move(void* const* base, const og::i64* offset) {
    x0 = (const float*)base[0] + offset[0];
    y0 = (float*)base[1] + offset[1];
  }
  OG_FN void steps(const og::i64* step) {
  }
  OG_FN void call() {
  }
  OG_FN void row() {
  }
  OG_FN void apply(const float v0, float& r0) const {
    const float t0 = og::swish(v0);  // Swish #1
    r0 = t0;
  }
  OG_FN void element(og::i64 i) const {
    float r0;
    apply(og::load(x0[i]), r0);
    y0[i] = og::store<float>(r0);
  }
  template <int V> struct Packs {
    og::Pack<float, V> x0;
  };
  template <int V> OG_FN void fetch(Packs<V>& in, og::i64 i) const {
    in.x0 = og::load_pack<V>(x0 + i);
  }
  template <int V> OG_FN void finish(const Packs<V>& in, og::i64 i) const {
    float r0[V];
    OG_UNROLL for (int k = 0; k < V; ++k) apply(og::load(in.x0.item[k]), r0[k]);
    og::store_pack<V>(y0 + i, r0);
  }
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(void* x0, void* y0, og::i64 n) {
  void* const base[] = {x0, y0};
  const og::i64 step[] = {1, 1};
  og::flat<Fused, 4, 2>(base, step, n);
}
"""


def swish(name: str = "x") -> og.Graph:
    g = og.Graph()
    x = g.input(name, dtype="f32", shape=(64, 64))
    g.output(g.add_op("Multiply", x, g.add_op("Sigmoid", x, name=f"s{name}"), name=f"y{name}"))
    return g


def test_swish_kernel_source_equals_golden_text() -> None:
    source = dense(lowered(swish()).loop, (64, 64))
    assert source.own == SWISH.replace("ENTRY", source.entry) and source.code.endswith("\n\n" + source.own)


_TWICE = """
import opgraph as og
from opgraph.codegen.kernel import cuda_source
from opgraph.ir.logical_tensor import row_major
from opgraph.loops.layout import bind
from opgraph.loops.lower import lower
from opgraph.schedule.cuda import Cuda
from opgraph.schedule.table import choose_schedule
g = og.Graph()
inputs = [g.input(f"i{k}", dtype="bf16", shape=(8, 8)) for k in range(9)]
total = inputs[0]
for value in inputs[1:]:
    total = g.add_op("Add", g.add_op("Swish", total), value)
g.output(total)
g.finalize()
loop = lower(g.get_partitions()[0]).loop
layout = bind(loop, [(8, 8)] * len(loop.loads), [(8, 1)] * len(loop.loads))
print(cuda_source(choose_schedule(loop, layout, Cuda())).code)
"""


def test_kernel_source_is_the_same_in_every_process() -> None:
    def text(seed: str) -> str:
        command = [sys.executable, "-c", _TWICE]
        path = ":".join(p for p in sys.path if p)
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert text("1") == text("2")


@pytest.mark.parametrize(
    "name", ['"; evil(); "', "*/ evil /*", "a\nevil", "evil\\", "//evil", "%s{evil}", "évil", "x0"]
)
def test_model_names_never_reach_kernel_source(name: str) -> None:
    g = og.Graph()
    x = g.input(name, dtype="f32", shape=(4, 4))
    c = g.constant(name + "c", [1.0, 2.0, 3.0, 4.0], dtype="f32")
    g.output(g.add_op("Multiply", g.add_op("Sigmoid", x, name=name + "s"), c, name=name + "y"))
    loop = lowered(g).loop
    source = dense(loop, (4, 4), (4,))
    assert "vil" not in source.code
    plain = og.Graph()
    x = plain.input("x", dtype="f32", shape=(4, 4))
    c = plain.constant("c", [1.0, 2.0, 3.0, 4.0], dtype="f32")
    plain.output(plain.add_op("Multiply", plain.add_op("Sigmoid", x), c))
    assert source.code == dense(lowered(plain).loop, (4, 4), (4,)).code


def test_nvrtc_error_names_line_and_op() -> None:
    low = lowered(swish())
    source = dense(low.loop, (64, 64))
    broken = replace(source, code=source.code.replace("og::swish(v0)", "og::swoosh(v0)"))
    with pytest.raises(nvrtc.CompileError) as caught:
        nvrtc.compile_text(broken.code, "sm_90", nvrtc.OPTIONS)
    text = str(refused(str(caught.value), broken, low.labels))
    assert 'no member "swoosh"' in text and "const float t0 = og::swoosh(v0);  // Swish #1" in text
    assert '\n  where: Multiply "yx"\n  fix:   this is a bug of opgraph' in text
