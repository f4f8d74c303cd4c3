"""Bernoulli draws equal torch's, and so do all numbers drawn after them."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

import opgraph.torch as ogt
from opgraph.runtime import cpu_compiler
from opgraph.torch.graph import bernoulli as module
from opgraph.torch.graph.bernoulli import bernoulli

WORDS = 624  # the words of a generator's state


def drawn(function, skipped=0, seed=5):
    """The draws of a function, followed by the generator's state and draws of other kinds."""
    torch.manual_seed(seed)
    torch.randn(3)
    torch.empty(skipped, dtype=torch.int32).random_()
    return function(), torch.get_rng_state(), torch.rand(3), torch.randn(5)


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def without_threads_of_pytest(monkeypatch):
    monkeypatch.setattr(module, "_draws_alone", lambda: True)


@pytest.fixture
def native():
    """The native loop. If this torch version draws other numbers than the loop, dropout is slow and the tests fail."""
    if not cpu_compiler.is_available():
        pytest.skip("no C++ compiler")
    found = module._native()
    assert found is not None
    return found


@pytest.mark.parametrize("skipped", [0, 1, 2, WORDS - 4, WORDS - 3, WORDS - 2, WORDS - 1, WORDS, WORDS + 1])
@pytest.mark.parametrize("count", [1, 2, WORDS // 2 - 1, WORDS // 2, WORDS // 2 + 1, WORDS, 5 * WORDS + 1, 10007])
def test_numbers_and_generator_state_equal_torchs_from_any_state(count, skipped, native, monkeypatch):
    monkeypatch.setattr(module, "_FEWEST", 0)
    for p in (0.9, 0.1):
        like = torch.empty(count, dtype=torch.bool)
        assert_same(drawn(partial(bernoulli, like, p), skipped), drawn(partial(like.bernoulli, p), skipped))


@pytest.mark.parametrize("p", [0.0, 1.0, 0.5, 2.0**-53, 1 - 2.0**-53, 1e-300])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_every_dtype_draws_torchs_numbers(dtype, p, native):
    like = torch.empty(90, 70, dtype=dtype).t()
    assert_same(drawn(lambda: bernoulli(like, p)), drawn(lambda: torch.ops.aten.bernoulli.p(like, p)))


def test_probability_above_one_is_refused_as_by_torch():
    with pytest.raises(RuntimeError, match="expects p to be in"):
        bernoulli(torch.empty(5000), 1.5)


def test_callers_generator_is_used():
    like = torch.empty(5000)
    own, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    assert_same(bernoulli(like, 0.5, generator=own), torch.ops.aten.bernoulli.p(like, 0.5, generator=other))


DRAWN_BY_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import torch
from opgraph.torch.graph.bernoulli import bernoulli

like, found = torch.empty(5000, dtype=torch.bool), []
def draw(function):
    for _ in range(200):
        found.append(function())
def numbers(calls):
    return {call().numpy().tobytes() for call in calls}
torch.manual_seed(1)
with ThreadPoolExecutor(4) as pool:
    calls = [partial(bernoulli, like, 0.5), partial(like.bernoulli, 0.5)] * 2
    for done in [pool.submit(draw, call) for call in calls]:
        done.result()
torch.manual_seed(1)
assert {one.numpy().tobytes() for one in found} == {like.bernoulli(0.5).numpy().tobytes() for _ in found}
"""


def test_threads_draw_no_number_twice(native):
    """In a process without pytest's threads."""
    subprocess.run([sys.executable, "-c", DRAWN_BY_THREADS], check=True)


ALONE = """
import multiprocessing, threading
import torch
from opgraph.torch.graph.bernoulli import _draws_alone

assert _draws_alone()
queue = multiprocessing.Queue()
queue.put(1)  # starts a thread that feeds a pipe
loader = iter(torch.utils.data.DataLoader(range(4), num_workers=1))
next(loader)
assert threading.active_count() > 1
assert _draws_alone()
done = threading.Event()
other = threading.Thread(target=done.wait, daemon=True)
other.start()
assert not _draws_alone()
done.set()
other.join()
assert _draws_alone()
"""


def test_library_threads_do_not_count_as_drawing_threads():
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def test_default_device_does_not_change_the_draws():
    like = torch.empty(5000)
    module._native.cache_clear()

    def elsewhere():
        with torch.device("meta"):
            return bernoulli(like, 0.5)

    assert_same(drawn(elsewhere), drawn(lambda: torch.ops.aten.bernoulli.p(like, 0.5)))


class Dropping(nn.Module):
    def forward(self, x):
        return functional.dropout(functional.dropout(x * 2, 0.3).relu(), 0.6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dropout_of_large_tensors_has_eagers_mask(dtype, memory_format):
    found = []
    for model in (ogt.fuse(Dropping()), Dropping()):
        x = (
            torch.linspace(-1, 1, 4 * 6 * 30 * 31, dtype=dtype)
            .view(4, 6, 30, 31)
            .contiguous(memory_format=memory_format)
        )
        x.requires_grad_()

        def step(model=model, x=x):
            y = model(x)
            y.sum().backward()
            return y.detach() != 0, x.grad != 0

        found.append(drawn(step))
    assert_same(*found)


def test_native_dropout_at_p_0_draws_as_in_eager():
    x = torch.randn(90, 70)
    dropped = partial(torch.native_dropout, x, 0.0, True)
    assert_same(drawn(torch.compile(dropped, backend="opgraph")), drawn(dropped))


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("train", [True, None])
def test_native_dropout_has_eagers_mask_and_generator_state(p, train):
    """It drops with train=None, though torch's rule for fake tensors returns the argument; at p=1 it draws, too."""
    x = torch.randn(90, 70, requires_grad=True)

    def step(dropped):
        y, mask = dropped(x)
        return y.detach(), mask, *torch.autograd.grad(y.sum(), x)

    for native_dropout in (torch.native_dropout, torch.ops.aten.native_dropout.default):
        dropped = partial(native_dropout, p=p, train=train)
        found = drawn(partial(step, torch.compile(dropped, backend="opgraph")))
        assert_same(found, drawn(partial(step, dropped)))


def test_dropout_at_p_1_draws_nothing_as_in_eager():
    x = torch.randn(90, 70)
    dropped = partial(functional.dropout, x, 1.0)
    assert_same(drawn(torch.compile(dropped, backend="opgraph")), drawn(dropped))


def test_first_draw_of_a_process_may_be_fake_tensors(native):
    """`ogt.saved_tensors(..., dry_run=True)` draws fake tensors. The loop must be compared with torch before that."""
    module._native.cache_clear()
    with FakeTensorMode():
        made = bernoulli(torch.empty(module._FEWEST), 0.5)
    assert isinstance(made, FakeTensor)
    assert module._native() is not None
