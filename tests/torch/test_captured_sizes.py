"""Other sizes: a captured model that is called with another batch size or sequence length compiles no kernel again."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402

import opgraph as og  # noqa: E402
import opgraph.torch as ogt  # noqa: E402
from opgraph.loops.lower import lower  # noqa: E402
from opgraph.runtime import cpu_compiler  # noqa: E402
from opgraph.runtime.cpu_kernel import HostKernel  # noqa: E402
from opgraph.torch.graph import dynamic_shapes, program  # noqa: E402
from opgraph.torch.graph.backend import observed  # noqa: E402
from opgraph.torch.graph.program import Program  # noqa: E402
from opgraph.torch.graph.size_expressions import Expressions, NotSymbolicError  # noqa: E402


@pytest.fixture
def kernels(monkeypatch):
    """The names of all loaded kernels; a kernel's name is a hash of its text."""
    found = set()
    load = cpu_compiler.load

    def noted(source, *args, **kwargs):
        found.add(source.entry)
        return load(source, *args, **kwargs)

    monkeypatch.setattr(cpu_compiler, "load", noted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    return found


class Images(nn.Module):
    """BatchNorm in training, GroupNorm, LayerNorm over channels, a mean over the image, cross entropy."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3)
        self.batch, self.group, self.layer = nn.BatchNorm2d(8), nn.GroupNorm(2, 12), nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x, labels):
        x = F.relu(self.batch(self.first(x)))
        x = F.silu(self.group(self.second(x)))
        x = self.layer(x.permute(0, 2, 3, 1)).mean((1, 2))
        return F.cross_entropy(self.head(x), labels, label_smoothing=0.1)


class Tokens(nn.Module):
    """Half a Llama block and half a GPT-2 block: RMSNorm, rotary embedding, causal attention, GELU, a mean loss."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, ids, wanted):
        x = self.embedding(ids)
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        positions = torch.arange(ids.shape[1])
        angles = positions[:, None] * 0.1 ** torch.arange(4.0)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        q, k = (t * cos + torch.cat([-t[..., 4:], t[..., :4]], -1) * sin for t in (q, k))
        hidden = torch.where(positions[:, None] < positions, -torch.inf, 0.0)
        weights = torch.softmax(q @ k.mT * 8**-0.5 + hidden, -1)
        x = x + (F.dropout(weights, 0.1) @ v).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return (x[:, :-1] - wanted[:, 1:]).square().mean() * ids.shape[1]


def images(batch, size):
    return torch.randn(batch, 3, size, size), torch.arange(batch) % 5


def tokens(batch, length):
    return torch.randint(0, 20, (batch, length)), torch.randn(batch, length, 16)


def step(model, inputs, seed):
    """The loss, the gradients and the buffers of a training step."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "feed", "sizes"),
    [
        (Images, images, [(2, 17), (3, 17), (5, 17), (3, 19)]),  # images of 169 elements and more: see parallel.py
        (Tokens, tokens, [(2, 9), (3, 9), (5, 9), (3, 11), (5, 12)]),
    ],
    ids=["images", "tokens"],
)
def test_other_sizes_compile_no_kernel(kernels, kind, feed, sizes):
    """One program serves each set of sizes. Values that depend on sizes (1/N, masks) are not in a kernel's text."""
    plain = kind()
    fused = ogt.fuse(kind())
    fused.load_state_dict(plain.state_dict())
    counts = []
    for number, size in enumerate(sizes):
        inputs = feed(*size)
        torch.testing.assert_close(*(step(model, inputs, number) for model in (plain, fused)))
        counts.append(len(kernels))
    assert counts == [counts[0]] * len(sizes)


def test_symbolic_and_fixed_sizes_save_the_same_tensors(kernels):
    """A mask that depends on sizes is recomputed; a loss keeps its logarithms, not its exponentials."""
    model = ogt.fuse(Tokens())
    kept = []
    for size in ((2, 9), (3, 9)):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, packed=packed: packed.append(x) or x, lambda x: x):
            model(*tokens(*size)).backward()
        kept.append(len(packed))
    assert kept[0] == kept[1]


def test_cross_entropy_saves_only_log_probabilities(kernels):
    model = ogt.fuse(Rows(lambda x, y: F.cross_entropy(x * 2, y)))
    x = torch.randn(6, 40).requires_grad_()
    captured = []
    with observed(captured.append):
        model(x, torch.arange(6)).backward()
    (graph,) = captured
    sizes = sorted(n.meta["val"].numel() for n in graph.forward.saved)
    assert sizes[-1] == 6 * 40 and sum(size > 6 for size in sizes) == 1


class Rows(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_group_norm_backward_is_fused(kernels):
    """Values computed only for the gradients of a convolution are kept apart from ops that read them through a view."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 4, 3)

        def forward(self, x):
            return self.second(F.silu(self.norm(self.first(x))))

    captured = []
    with observed(captured.append):
        ogt.fuse(Net())(torch.randn(2, 3, 8, 8)).square().sum().backward()
    (graph,) = captured
    assert {str(n.target) for n in graph.backward.library_calls} == {"aten.convolution_backward.default"}


# Numbers outside a kernel's text


def test_kernel_source_does_not_depend_on_scalar_arguments():
    sources, results = set(), []
    for factor in (0.25, 3.0):
        g = og.Graph()
        x = g.input("x", "f32", (4, 8))
        number = g.constant("", factor, dtype="f32")
        y = g.add_op("Multiply", g.add_op("ReduceSum", x, axes=[1], keep_dims=True), number)
        g.set_outputs([g.add_op("Multiply", g.add_op("Subtract", x, y), number)])
        (part,) = g.finalize().get_partitions()
        lowered = lower(part, arguments={number.id})
        assert str(factor) in str(lower(part).loop)
        sources.add(str(lowered.loop))
        results.append(lowered.loads)
    assert len(sources) == 1
    assert [t.data.item() for loads in results for t in loads if t.is_constant] == [0.25, 3.0]


NETWORKS = ["ResNet-18, ReLU", "Llama", "GPT-2", "ConvNeXt"]


@pytest.mark.sweep
@pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize("name", NETWORKS)
def test_other_sizes_of_networks_compile_no_kernel(kernels, name):
    model = ogt.fuse(_network(name))
    counts = []
    # Short rows and sums of two have separate kernels, and so do masks with more bytes than a set of sizes may hold.
    for batch, length in [(3, 136), (4, 136), (3, 144), (3, 152)]:
        if name in ("Llama", "GPT-2"):
            ids = torch.randint(0, 60, (batch, length))
            logits = model(ids).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, ids[:, 1:].flatten())
        else:
            made = model(torch.randn(batch + 6, 3, 32, 32))  # 16 elements of each image in a channel
            loss = getattr(made, "logits", made).square().mean()
        loss.backward()
        counts.append(len(kernels))
    assert counts == [counts[0]] * len(counts)


def _network(name):
    import transformers as t

    from opgraph.torch import zoo

    words = {"vocab_size": 64, "use_cache": False}
    make = {
        "ResNet-18, ReLU": lambda: zoo.resnet18(nn.ReLU),
        "Llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, **words)
        ),
        "GPT-2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=160, **words)),
        "ConvNeXt": lambda: t.ConvNextForImageClassification(
            t.ConvNextConfig(depths=[1, 1, 1], hidden_sizes=[16, 32, 48], num_stages=3, image_size=32)
        ),
    }
    return make[name]().train()


@pytest.fixture
def programs(monkeypatch):
    """The graphs of all programs that are created."""
    made = []
    init = Program.__init__

    def noted(self, module, *args, **kwargs):
        init(self, module, *args, **kwargs)
        made.append(module)

    monkeypatch.setattr(Program, "__init__", noted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    return made


class Cached(nn.Module):
    """Attention of one token to a growing cache, with positions that depend on its length."""

    def __init__(self):
        super().__init__()
        self.qkv, self.norm = nn.Linear(16, 48), nn.LayerNorm(16)

    def forward(self, x, keys, values):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        ages = torch.arange(keys.shape[1]) - keys.shape[1] + 1
        weights = torch.softmax(q @ keys.mT / keys.shape[1] ** 0.5 + ages * 0.1, -1)
        return x + weights @ values / keys.shape[1], keys, values


def test_growing_kv_cache_compiles_no_further_programs(programs):
    """No more after the second length. Each length used to get its own program, which took longer than eager."""
    plain, fused = Cached(), ogt.fuse(Cached())
    fused.load_state_dict(plain.state_dict())
    ours = theirs = [torch.randn(2, 3, 16), torch.randn(2, 3, 16)]
    counts = []
    with torch.no_grad():
        for _ in range(12):
            x = torch.randn(2, 1, 16)
            a, *theirs = plain(x, *theirs)
            b, *ours = fused(x, *ours)
            torch.testing.assert_close([b, *ours], [a, *theirs])
            counts.append(len(programs))
    assert counts == [1, *[3] * 11]  # one for fixed sizes, two for all sizes


def half_written(x):
    half = x.shape[0] // 2
    y = x * 3
    y[:half] = torch.sigmoid(x[:half])
    return y * 2


def last_half_written(x):
    half = x.shape[0] // 2
    y = x * 3
    y[half:] = torch.sigmoid(x[half:])
    return y * 2


def third_padded(x):
    n = x.shape[0]
    return F.pad(x[: n // 3].sin(), (0, 0, n // 3, n - 2 * (n // 3))) * x


def half_read(x):
    return (x * 2)[: x.shape[0] // 2].exp()


def half_filled(x):
    y = x * 2
    y[: x.shape[0] // 2] = 0
    return y.exp()


def half_padded(x):
    half = x.shape[0] // 2
    return F.pad(x[:half].exp(), (0, 0, 0, x.shape[0] - half)) + x


@pytest.mark.parametrize(
    ("function", "sizes", "width"),
    [
        (half_written, (12, 4, 6, 5, 7), 3),
        (half_written, (8, 6, 9, 7, 8), 5),
        (last_half_written, (8, 6, 9, 7, 8), 7),
        (third_padded, (8, 6, 9, 7, 8, 11), 7),
        *[(function, (7, 9, 12, 5, 13, 3, 17), None) for function in (half_read, half_filled, half_padded)],
    ],
)
def test_slice_that_is_half_an_axis_only_at_even_sizes(function, sizes, width):
    """In the two programs that the one for all sizes is made of, the part may fill a whole number of blocks.

    Without a width, images are square, and the third sample of sizes is odd.
    """
    torch._dynamo.reset()
    fused = torch.compile(function, backend="opgraph")
    for size in sizes:
        columns = width or size
        x, y = (torch.linspace(-1, 1, size * columns).view(size, columns).requires_grad_() for _ in range(2))
        got, wanted = fused(x), function(y)
        torch.testing.assert_close(got, wanted)
        got.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("sizes", [[(2, 8), (2, 9), (3, 20)], [(4, 10), (5, 11), (3, 20)]])
def test_offset_that_is_a_product_of_symbols(sizes):
    """A slice moves to the transposed operand. Its offset there, n * (s // 2), is equal in the first two samples."""

    def function(a, b):
        middle = a.shape[1] // 2
        return torch.relu(a + b.t())[:, middle : middle + 2] * 2

    torch._dynamo.reset()
    fused = torch.compile(function, backend="opgraph", dynamic=True)
    for n, s in sizes:
        a, b = torch.zeros(n, s), torch.arange(1.0 * n * s).view(s, n)
        assert torch.equal(fused(a, b), function(a, b))


def test_as_strided_beyond_a_shorter_value_is_an_error():
    torch._dynamo.reset()
    fused = torch.compile(lambda x: torch.as_strided(x.relu(), (4, 3), (2, 1)) * 2, backend="opgraph", dynamic=True)
    for size in (12, 13, 9):
        assert torch.equal(fused(torch.ones(size)), torch.full((4, 3), 2.0))
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        fused(torch.ones(5))


def test_training_on_other_lengths_reuses_programs_and_repeats_bits(programs):
    plain, fused = Tokens(), ogt.fuse(Tokens())
    fused.load_state_dict(plain.state_dict())
    sizes = [(2, 9), (3, 10), (5, 12), (2, 31), (4, 17), (3, 10), (2, 64), (5, 12)]
    inputs = {size: tokens(*size) for size in sizes}
    counts, gradients = [], {}
    for size in sizes:
        wanted, got = (step(model, inputs[size], 4) for model in (plain, fused))
        torch.testing.assert_close(got, wanted)
        assert all(map(torch.equal, got, gradients.setdefault(size, got)))
        counts.append(len(programs))
    assert counts[0] == 2
    assert counts[1:] == [8] * 7  # three of forward and of backward, which have two symbols each


def compare_step(plain, fused, *given, **tolerance):
    """Compares the results and gradients of two models."""
    found = []
    for model in (plain, fused):
        model.zero_grad()
        result = model(*given)
        result.square().mean().backward()
        found.append([result.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, **tolerance)


class Positions(nn.Module):
    """Tokens and their mask have equal lengths, which two inequalities imply."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens, mask):
        length = tokens.shape[1]
        if length - mask.shape[1] > 0:
            mask = F.pad(mask, (0, length - mask.shape[1]))
        if mask.shape[1] > length:
            mask = mask[:, :length]
        return self.out(self.embed(tokens) * mask[:, torch.arange(length), None]).softmax(-1)


def test_sizes_that_guards_hold_equal_compile_no_programs(programs):
    plain = Positions()
    fused = ogt.fuse(copy.deepcopy(plain))
    counts = []
    for length in (8, 13, 18, 10, 15):
        compare_step(plain, fused, torch.randint(0, 16, (2, length)), torch.rand(2, length))
        counts.append(len(programs))
    assert counts == [2, *[7] * 4]  # two symbols in forward, one in backward


def graphs_after(plain, fused, inputs):
    """Dynamo's number of graphs after each call of a fused function, whose results must equal the plain function's."""
    counters = torch._dynamo.utils.counters["stats"]
    before, counts = counters["unique_graphs"], []
    for given in inputs:
        torch.testing.assert_close(fused(*given), plain(*given))
        counts.append(counters["unique_graphs"] - before)
    return counts


def test_graph_with_several_results_keeps_symbolic_sizes(programs):
    """The graph is run on fake tensors to find the inputs that each result depends on. `F.pad` of a size that later
    became equal to another one read it as a number, and Dynamo captured a mixture of experts again for each length."""

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(16, 4), nn.Linear(4, 16)

        def forward(self, tokens, labels):
            hidden = self.embed(tokens)
            logits = self.out(hidden)
            following = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), following)
            return loss + (hidden * (labels > 0)[..., None]).mean(), logits

    plain = Padded()
    lengths = (8, 13, 18, 10, 15)
    inputs = [(torch.randint(0, 16, (2, n)), torch.randint(0, 16, (2, n))) for n in lengths]
    assert graphs_after(plain, ogt.fuse(copy.deepcopy(plain)), inputs) == [1, 2, 2, 2, 2]


class Attending(nn.Module):
    """Two of its results are computed from the first one, by a size."""

    def __init__(self):
        super().__init__()
        self.linear, self.positions = nn.Linear(4, 4), nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        t = x.shape[1]
        h = self.linear(x) + self.positions[:t]
        scores = (h @ h.transpose(1, 2) / t).softmax(-1)
        return h, h.mean(1, keepdim=True).sin() / t, scores.mean(1, keepdim=True) * torch.linspace(0, 1, t)


def test_size_specialized_by_guards_becomes_a_constant():
    """The graph used to run unfused in this case, with a warning."""
    torch.manual_seed(0)
    model = Attending()
    fused = ogt.fuse(copy.deepcopy(model))
    for shape in ((2, 3, 4), (3, 5, 4), (4, 4, 4), (3, 8, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(fused(x), model(x))


def test_reshape_by_input_size_keeps_the_size_symbolic(programs):
    """The fake tensors of the run that finds dependencies had numbers for sizes, and `reshape` compared them with the
    symbol: each batch size was captured and compiled again."""

    def function(x):
        rows = x.view(x.shape[0], -1) * 3
        return rows.exp(), rows.sin()

    inputs = [(torch.randn(batch, 2, 3, requires_grad=True),) for batch in (3, 7, 9, 11)]
    assert graphs_after(function, torch.compile(function, backend="opgraph"), inputs) == [1, 2, 2, 2]


def test_choice_of_saved_tensors_does_not_specialize_sizes():
    """Kernels check where a tensor is joined from others, which would specialize its sizes."""

    def function(x, w):
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1] * w
        halves = torch.cat((shifted.sin(), x), 1)
        return halves.exp() @ w, halves.cos()

    w = torch.randn(4, requires_grad=True)
    sizes = ((2, 8), (3, 12), (4, 16), (3, 20))
    inputs = [(torch.randn(rows, length, 4, requires_grad=True), w) for rows, length in sizes]
    first, *later = graphs_after(function, torch.compile(function, backend="opgraph"), inputs)
    assert later == [2 * first] * 3


def test_images_of_other_sizes_compile_no_programs(programs):
    """A convolution bounds the batch (below 16), and many of the remaining numbers are sizes of the graph itself."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8),
        nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    plain, fused = model, ogt.fuse(copy.deepcopy(model))
    counts = []
    for batch, size in ((4, 8), (5, 9), (6, 10), (4, 11), (5, 12), (6, 13)):
        x = torch.randn(batch, 3, size, size)
        results = []
        for each in (plain, fused):
            each.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in each.parameters())])
        torch.testing.assert_close(*results)
        counts.append(len(programs))
    assert counts == [2, *[8] * 5]  # forward and backward for fixed sizes, three of each for all sizes


def test_symbolic_programs_choose_the_kernels_of_traced_sizes(programs):
    """For a batch norm on few rows, one program stored a mask for two kernels. The other computed it in each, because
    the mask had more than twice the bytes of the statistics. As a result each batch had its own program."""
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8),
    )  # fmt: skip
    fused = ogt.fuse(copy.deepcopy(plain))
    counts = []
    for batch, size in ((4, 8), (5, 10), (6, 12), (7, 8), (8, 10)):
        compare_step(plain, fused, torch.randn(batch, 3, size, size), rtol=1e-4, atol=1e-6)
        counts.append(len(programs))
    assert counts == [2, *[8] * 4]


def test_other_sizes_of_compiled_kernels_start_no_threads(programs, monkeypatch):
    """Threads took most of the time of a step on graphs of nodes and edges, whose sizes differ at each step."""
    started = []
    monkeypatch.setattr(program, "at_once", lambda calls: (started.extend(calls), [call() for call in calls]))
    fused = ogt.fuse(Tokens())
    for length in (20, 24, 27):
        fused(*tokens(2, length)).backward()
    assert started
    started.clear()
    for length in (29, 22, 25):
        fused(*tokens(2, length)).backward()
    assert not started


def test_new_pairs_of_known_sizes_plan_no_kernel(programs, monkeypatch):
    """Example: graphs of nodes and edges. Their numbers occur in new pairs, and most kernels depend on one of them."""
    planned = []
    plan = HostKernel._planned
    monkeypatch.setattr(HostKernel, "_planned", lambda *args, **how: (planned.append(args), plan(*args, **how))[1])

    class Apart(nn.Module):
        def forward(self, nodes, edges):
            return torch.sigmoid(nodes) * nodes, torch.softmax(torch.tanh(edges), -1)

    fused = ogt.fuse(Apart())
    with torch.no_grad():
        for count, new in (((8, 20), True), ((9, 21), True), ((10, 22), True), ((9, 22), False), ((10, 21), False)):
            planned.clear()
            given = [torch.randn(n, 4) for n in count]
            torch.testing.assert_close(fused(*given), Apart()(*given))
            assert bool(planned) == new


def test_masks_of_many_bytes_need_only_two_more_programs(programs):
    class Masked(nn.Module):
        def forward(self, x):
            positions = torch.arange(x.shape[0])
            return torch.where(positions[:, None] < positions, 0.0, x * torch.sigmoid(x))

    fused = ogt.fuse(Masked())
    counts = []
    with torch.no_grad():
        for length in (8, 12, 30, 1100, 1300, 25):  # a mask of 1100 positions exceeds the bytes of a set of sizes
            x = torch.randn(length, length)
            torch.testing.assert_close(fused(x), Masked()(x))
            counts.append(len(programs))
    assert counts == [1, 3, 3, 5, 5, 5]


class Lazily(nn.Module):
    """Reads tensors that torch negates or conjugates lazily, when they are read."""

    def forward(self, x):
        return x.real * 2, x.imag[1:] + 1, x.conj().imag.sigmoid(), x.conj() * x


class Negated(nn.Module):
    def forward(self, x):
        return x * 2, x[1:] + 1, torch.sigmoid(x)


@pytest.mark.parametrize("conjugated", [False, True])
def test_lazily_negated_tensors_may_have_any_size(conjugated):
    plain, fused = Lazily(), ogt.fuse(Lazily())
    negated = ogt.fuse(Negated())
    for size in (3, 5, 4, 1, 7):
        z = torch.randn(size, dtype=torch.complex64)
        z = z.conj() if conjugated else z
        torch.testing.assert_close(fused(z), plain(z))
        torch.testing.assert_close(negated(z.imag), Negated()(z.imag))


def test_concurrent_threads_compile_each_program_once(programs, monkeypatch):
    draw = dynamic_shapes.sample_sizes

    def slowly(*args):
        time.sleep(0.3)
        return draw(*args)

    monkeypatch.setattr(dynamic_shapes, "sample_sizes", slowly)

    def plain(x):
        return torch.softmax(x @ x.mT, -1) @ x / x.shape[0]

    # Not dynamic=True: torch 2.11 sets it for the process in each call, and concurrent threads leave it set.
    fused = torch.compile(plain, backend="opgraph")
    inputs = [torch.randn(length, 16) for length in range(3, 9)]
    captured = []
    with observed(captured.append):
        fused(inputs[0])
        fused(inputs[1])
    _, graph = captured
    graph.inference.programs.clear()
    graph.inference._symbolic.clear()
    programs.clear()
    with ThreadPoolExecutor(len(inputs)) as pool:
        results = list(pool.map(fused, inputs))
    torch.testing.assert_close(results, list(map(plain, inputs)))
    assert len(programs) == 2


def test_empty_tensors_of_dynamic_size_agree_with_eager(programs):
    class Tail(nn.Module):
        def forward(self, x):
            return F.silu(x[4:] * 2), x.shape[0]

    fused = ogt.fuse(Tail())
    with torch.no_grad():
        for length in (9, 7, 12, 6, 5, 4, 3, 8):
            x = torch.randn(length, 5)
            torch.testing.assert_close(fused(x), Tail()(x))


@pytest.mark.parametrize(
    ("function", "sizes", "dtype"),
    [
        (lambda x: (x * 2, x.shape[0] > 10), (9, 12, 7, 10, 11), torch.float32),
        (lambda x: torch.full((3,), x.shape[0] > 10) & (x[:3, 0] > 0), (9, 12, 7, 10, 11), torch.float32),
        (lambda x: (x * (x.shape[0] / 1), torch.full((3,), float(x.shape[0]))), (9, 12, 7), torch.int64),
        (lambda x: ((x > x.shape[0] / 3000) * x, x == x.shape[0]), (3000, 3010, 30), torch.float16),
        (lambda x: x * torch.full((), x.shape[0], dtype=x.dtype), (3000, 3010, 30), torch.bfloat16),
    ],
    ids=["truth value", "mask of truth values", "float of an integer", "compared in f16", "filled in bf16"],
)
def test_numbers_derived_from_sizes_follow_each_call_and_keep_dtype(programs, function, sizes, dtype):
    """A truth value has no name; 12.0 is not 12; two sizes may round to the same f16 number."""
    fused = torch.compile(function, backend="opgraph")
    for size in sizes:
        x = torch.randn(size, 4).mul(2).to(dtype)
        torch.testing.assert_close(fused(x), function(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: x * torch.arange(10.0)[torch.arange(x.shape[0])][:, None], (10, 9, 8, 5, 10)),
        (lambda x: x * (3 / round(x.shape[0] / 4)), (3, 5, 4, 6, 9)),
    ],
    ids=["an index out of range", "a quotient of 0"],
)
def test_expressions_failing_only_at_unused_sizes_do_not_fail(programs, function, sizes):
    fused = torch.compile(function, backend="opgraph", dynamic=True)
    for size in sizes:
        x = torch.randn(size, 4, dtype=torch.float64)
        torch.testing.assert_close(fused(x), function(x))


def test_nested_tensors_of_any_row_lengths_reuse_kernels(kernels):
    """Their values are a tensor of the graph. The size that represents the lengths of rows has no number."""
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 3))
    fused = ogt.fuse(copy.deepcopy(model))
    compiled = set()
    for lengths in ((3, 5), (2, 4), (7,), (1, 1, 9), (3, 5)):
        values = torch.randn(sum(lengths), 8)
        found = []
        for network in (fused, model):
            torch.manual_seed(1)
            network.zero_grad()
            x = values.clone().requires_grad_()
            y = network(_nested(x, lengths))
            y.values().square().sum().backward()
            found.append((y.offsets(), y.values(), x.grad, *(p.grad for p in network.parameters())))
        for mine, eager in zip(*found, strict=True):
            torch.testing.assert_close(mine, eager)
        compiled = compiled or set(kernels)
    assert compiled and kernels == compiled


def _nested(values, lengths):
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *lengths]).cumsum(0))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "part",
    [lambda x: x.view(-1, 8), lambda x: x.view(1, -1, 8)[0], lambda x: x.view(8, -1).t()],
    ids=["the same memory", "one of a batch", "turned"],
)
def test_nested_tensor_over_a_view_may_change_row_count(part, training):
    """Dynamo traces the first call's number as a constant, and does not compare it in later calls."""
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
    fused = ogt.fuse(copy.deepcopy(model))
    for call, size in enumerate((8, 6, 12, 8)):
        numbers = torch.randn(size * 8)
        found = []
        for network in (fused, model):
            x = _nested(part(numbers.clone().requires_grad_(training)), (2, size - 2))
            is_first = network is fused and not call
            with pytest.warns(UserWarning, match="whose values are a view") if is_first else nullcontext():
                y = network(x).values()
            found.append((y, *(torch.autograd.grad(y.sum(), list(network.parameters())) if training else ())))
        assert len(found[1][0]) == size
        for mine, eager in zip(*found, strict=True):
            torch.testing.assert_close(mine, eager)


def test_backward_of_nested_tensor_may_run_twice():
    fused = ogt.fuse(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16)))
    for lengths in ((3, 5), (1, 1, 9), (7,)):
        values = torch.randn(sum(lengths), 8, requires_grad=True)
        loss = fused(_nested(values, lengths)).values().square().sum()
        first, again = (torch.autograd.grad(loss, values, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, again)


def test_size_expression_that_prints_wrongly_is_not_symbolic(monkeypatch):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from opgraph.torch.graph import size_expressions

    s = ShapeEnv().create_unbacked_symint()
    graph = _graph_of(s * 3 + 1)
    for text in ("s + ", "unknown(s)", "1 / (s - 10)", "3.0 * u0 + 1", "4 * u0"):
        monkeypatch.setattr(size_expressions, "python_text", lambda expression, text=text: text)
        with pytest.raises(NotSymbolicError):
            Expressions(graph, [s.node.expr], [[10], [12], [17]])


def _graph_of(*sizes):
    module = torch.fx.symbolic_trace(lambda x: x.relu())
    for node in module.graph.nodes:
        node.meta["val"] = torch.empty(()) if node.op == "output" else list(sizes)
    return module


def test_number_is_matched_to_the_size_expression_with_its_values():
    """For two sets of sizes. Expressions that no set distinguishes are compared again for the sizes of a call."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    s = ShapeEnv().create_unbacked_symint()
    symbol = s.node.expr
    found = Expressions(_graph_of(s, 3 * s + 1, torch.sym_min(s, 64)), [symbol], [[10], [12], [17]])
    assert found.name(7, 7) == 7
    name = found.name(31, 37)
    assert found.values()(5) == {name: 16}
    with pytest.raises(NotSymbolicError):
        found.name(31, 38)
    with pytest.raises(NotSymbolicError):
        found.name(31.0, 37.0)
    reciprocal = found.scalar(1 / 31, 1 / 37)
    assert found.values()(5) == {name: 16, reciprocal: 1 / 16}
    with pytest.raises(NotSymbolicError):
        found.values()(100)  # min(s, 64) equals s in all samples
