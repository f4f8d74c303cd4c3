"""Templates of the lines of random networks (`random_networks.py`).

In a template "a" and "b" are values, "s" is a number, "d" an axis of a, "n" its length, and LAYER a module of the
network. `ids` is an input of integers, `self.table` a parameter with a row for each of them, `more` a dict of numbers,
words and tensors.
"""

from __future__ import annotations

#: Lines for values of any shape. torch.compile draws other numbers for `alpha_dropout` of a transposed value.
POINTWISE = (
    "torch.sigmoid(a)", "torch.tanh(a)", "F.relu(a)", "F.silu(a)", "F.gelu(a)", "F.gelu(a, approximate='tanh')",
    "torch.exp(-a.abs())", "F.softplus(a)", "a.abs()", "-a", "torch.sin(a)", "a.cos()", "(a.abs() + 1).sqrt()",
    "(a * a + 1).rsqrt()", "torch.log1p(a.abs())", "torch.erf(a)", "F.hardswish(a)", "F.leaky_relu(a, 0.1)",
    "F.elu(a)", "a.clamp(-1, 1.5)", "a.square()", "1 / (1 + a.abs())", "F.mish(a)", "a * s", "a + s", "s - a",
    "a ** 2", "a.sign() * a", "a.detach() * a", "torch.where(a > s, a, s * a)", "a.masked_fill(a > 1, 0.5)",
    "(a > 0).to(a.dtype)", "(a > 0) * a", "a.clone()", "a.contiguous()", "a.detach()", "a.nan_to_num()",
    "a.floor() + a", "torch.logaddexp(a, torch.zeros_like(a))", "a.float().to(a.dtype)", "a % 0.7",
    "F.dropout(a, 0.3, self.training)", "a * torch.rand_like(a)", "a + a.new_ones(a.shape[-1:])",
    "torch.ones_like(a) * a", "F.hardtanh(a)", "a.tanh() if self.training else a * 2", "torch.lerp(a, a * s, 0.3)",
    "F.celu(a)", "F.selu(a)", "F.softsign(a)", "F.logsigmoid(a)", "F.tanhshrink(a)", "F.softshrink(a)",
    "F.hardshrink(a)", "F.hardsigmoid(a)", "F.relu6(a)", "F.threshold(a, 0.1, s)", "a.frac()", "torch.fmod(a, 0.7)",
    "a.round() * a", "torch.sinc(a)", "torch.asinh(a)", "torch.erfinv(a.tanh() * 0.9)", "torch.lgamma(a.abs() + 1)",
    "torch.digamma(a.abs() + 1)", "torch.i0(a)", "torch.special.log_ndtr(a)", "F.rrelu(a, training=self.training)",
    "F.alpha_dropout(a.contiguous(), 0.2, self.training)", "a.sigmoid().logit(1e-3)", "torch.complex(a, a * s).abs()",
    "torch.view_as_real(torch.complex(a, -a)).sum(-1)", "torch.randn_like(a) + a",
    "torch.bernoulli(a.sigmoid().detach()) * a", "torch.vmap(lambda t: t.sigmoid() * t)(a)", "Doubled.apply(a)",
    "torch.func.grad(lambda t: t.pow(3).sum())(a)", "torch.fft.rfft(a).abs()", "torch.fft.ifft(torch.fft.fft(a)).real",
    "2 ** a.tanh()",
)  # fmt: skip
BINARY = (
    "a + b", "a - b", "a * b", "a / (b.abs() + 1)", "torch.maximum(a, b)", "torch.minimum(a, b)",
    "torch.where(a > b, a, b)", "torch.addcmul(a, a, b, value=s)", "torch.lerp(a, b, 0.25)", "torch.hypot(a, b)",
    "torch.atan2(a, b)", "a * torch.sigmoid(b)", "F.silu(a) * b", "torch.add(a, b, alpha=s)", "(a < b).to(a.dtype)",
    "a.addcdiv(a, b.abs() + 1)", "torch.copysign(a, a.detach() - s)", "torch.fmax(a, b)",
    "torch.xlogy(a.abs(), b.abs() + 1)",
    "F.mse_loss(a, b)", "F.smooth_l1_loss(a, b)", "F.huber_loss(a, b, reduction='sum')",
    "F.binary_cross_entropy_with_logits(a, b.sigmoid())", "F.cosine_similarity(a, b, -1)",
    "F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction='batchmean')", "a @ b.transpose(-1, -2)",
    "torch.cat((a, b), -1)", "torch.stack((a, b), 1)", "torch.einsum('i...,j...->ij...', a, b)",
    "F.scaled_dot_product_attention(a, b, b, is_causal=True)", "torch.where((a > 0) & (b > 0), a, b)",
    "torch.polar(a.abs(), b).real", "a.expand_as(torch.rand_like(b))",
    "torch.remainder(a, b.abs() + 1)", "torch.logaddexp2(a, b)", "a.clamp(max=b)",
)  # fmt: skip
#: Lines for an axis of a value.
AXIS = (
    "a.sum(d)", "a.mean(d)", "a.sum(d, keepdim=True)", "a.mean(d, keepdim=True)", "a.amax(d, keepdim=True)",
    "a.amin(d)", "a.var(d, keepdim=True)", "a.std(d, unbiased=False)", "a.logsumexp(d)", "torch.softmax(a, d)",
    "F.log_softmax(a, d)", "a.cumsum(d)", "F.normalize(a, dim=d)", "a - a.mean(d, keepdim=True)",
    "a / (a.abs().amax(d, keepdim=True) + 1)", "a.norm(dim=d, keepdim=True)", "a.prod(d)", "a.max(d)[0]",
    "a.topk(1, d)[0]", "a.sort(d)[0]", "a.flip(d)", "a.roll(1, d)", "a.unbind(d)[0]", "a.unbind(d)[-1]",
    "a.select(d, 0)", "a.narrow(d, 0, n // 2)", "a.narrow(d, n // 2, n - n // 2)", "a.unsqueeze(d)", "a.squeeze(d)",
    "torch.cat((a, a * s), d)", "torch.cat((a.narrow(d, n // 2, n - n // 2), a.narrow(d, 0, n // 2)), d)",
    "torch.stack((a, -a), d)", "a.chunk(2, d)[0]", "a.chunk(2, d)[-1]", "a.repeat_interleave(2, d)",
    "torch.cat((a, a.detach()), d)", "a.transpose(d, 0)", "a.transpose(d, -1)", "a.movedim(d, 0)",
    "a.index_select(d, torch.arange(n - 1, -1, -1))", "a.unfold(d, 2, 1)", "a.unflatten(d, (n // 2, 2))",
    "torch.stack(a.unbind(d), d)", "a.split((1, n - 1), d)[1]", "a.gather(d, a.argsort(d))",
    "a.std(d, keepdim=True) * a", "F.glu(a, d)", "a.argmax(d).to(a.dtype)", "a.diff(dim=d)",
)  # fmt: skip
WHOLE = (
    "a.sum()", "a.mean()", "a * a.mean()", "a / (1 + a.abs().max())", "a.flatten()", "a.flatten(1)",
    "a.reshape(a.shape[0], -1)", "a.t() if a.dim() == 2 else a.transpose(-1, -2)",
    "a.permute(*reversed(range(a.dim())))", "a[..., ::2]", "a[:, 1:]", "a[1:]", "a[..., :-1]", "a[None]",
    "a.expand(2, *a.shape)", "a.tril()", "a.triu(1)", "F.pad(a, (1, 1))", "F.pad(a, (0, 1), value=s)",
    "a.view(a.shape)", "a.repeat(*(1,) * (a.dim() - 1), 2)", "a.diagonal(0, -2, -1)", "F.layer_norm(a, a.shape[-1:])",
    "F.rms_norm(a, a.shape[-1:])", "a @ a.transpose(-1, -2)", "a.std() * a",
    "torch.einsum('...ij,...kj->...ik', a, a)", "a.softmax(-1) @ a.transpose(-1, -2)",
    "a.as_strided(a.shape, a.stride())", "a.reshape(-1, a.shape[-1])", "a.view(-1)", "a.mT.contiguous()",
    "a[..., None] * a[..., None, :]", "a[a.dim() * [0]]", "F.scaled_dot_product_attention(a, a, a)",
    "a.clone(memory_format=torch.preserve_format)", "a.new_zeros(a.shape) + a",
)  # fmt: skip
#: Lines with two results.
PARTS = (
    "a.chunk(2, d)", "a.split(n // 2 + 1, d)", "a.unbind(d)[:2]", "a.max(d)", "a.min(d, keepdim=True)", "a.topk(2, d)",
    "torch.var_mean(a, d)", "torch.std_mean(a, d, keepdim=True)", "a.sort(d, descending=True)",
    "torch.aminmax(a, dim=d)", "a.tensor_split(2, d)", "(a * s, a.detach())", "a.median(d)", "a.cummax(d)",
    "torch.broadcast_tensors(a, a.new_ones(a.shape[-1:]))", "F.max_pool2d(a, 2, return_indices=True)",
    "torch.frexp(a)", "a.kthvalue(1, d)",
)  # fmt: skip
#: Reads and writes at indices.
INDEXED = (
    "torch.zeros_like(a).scatter(d, a.argsort(d), a)", "a.scatter_add(d, a.argsort(d), a)",
    "a.index_add(d, torch.tensor([0]), a.narrow(d, 0, 1))", "a.index_put((torch.tensor([0]),), a[0] * 2)",
    "a.index_put((torch.tensor([0, 0]),), a[:1] * 2, accumulate=True)", "a[torch.tensor([0, -1])]",
    "a[..., torch.tensor([0, 0])]", "a[:, torch.tensor([1, 0])]", "a[[0, -1]]", "a[a > s].sum()",
    "F.one_hot(a.argmax(d), n).to(a.dtype)", "self.table[a.argmax(d) % 7]", "F.embedding(a.argmax(d) % 7, self.table)",
    "a.take_along_dim(a.argsort(d), d)", "a.take(torch.arange(4))",
    "a.index_copy(d, torch.tensor([0]), a.narrow(d, n - 1, 1))", "a.select_scatter(a.select(d, 0) * s, d, n - 1)",
    "a.slice_scatter(a.narrow(d, 0, 1), d, n - 1)", "a.scatter_reduce(d, a.argsort(d), a, 'amax')",
    "torch.bucketize(a, torch.linspace(-1, 1, 5, dtype=a.dtype))", "a.masked_scatter(a > s, -a)",
    "F.embedding(ids, self.table)", "self.table[ids]", "F.one_hot(ids, 7).to(torch.float64)",
    "F.embedding(ids, self.table, padding_idx=0)", "F.embedding_bag(ids, self.table, mode='mean')",
    "F.embedding_bag(ids, self.table, mode='max')", "F.cross_entropy(F.embedding(ids, self.table).mT, ids)",
    "(ids * 2).to(torch.float64)", "a * ids[0, 0]", "a + (ids > 2).sum()", "ids.cumsum(0) % 5",
    "torch.searchsorted(torch.linspace(-1, 1, 5, dtype=a.dtype), a)",
    "F.cross_entropy(a.flatten(1), a.flatten(1).argmax(1))", "F.nll_loss(a.flatten(1).log_softmax(1), ids[:, 0] % 2)",
)  # fmt: skip
#: Lines for images (B, C, H, W). In torch 2.13 the backward of group_norm crashes if H and W are transposed.
IMAGE = (
    "F.max_pool2d(a, 2)", "F.avg_pool2d(a, 2)", "F.adaptive_avg_pool2d(a, 1)", "F.interpolate(a, scale_factor=2)",
    "F.interpolate(a, scale_factor=2, mode='bilinear')", "a.mean((2, 3))", "a.sum((0, 2, 3))",
    "a.amax((2, 3), keepdim=True)", "a.contiguous(memory_format=torch.channels_last)",
    "F.group_norm(a.contiguous(), 1)",
    "F.instance_norm(a)", "a.permute(0, 2, 3, 1)", "a * a.mean((2, 3), keepdim=True).sigmoid()",
    "F.pixel_unshuffle(a, 2)", "a.var((0, 2, 3), keepdim=True) + a", "F.pad(a, (1, 0, 0, 1))",
    "a.flatten(2).transpose(1, 2)", "F.max_pool2d(a, 3, 1, 1)",
)  # fmt: skip
#: Constructors of modules, for a value with c at axis 1 or n at the end.
LAYERS_IMAGE = (
    "nn.Conv2d({c}, 4, 3, padding=1)", "nn.Conv2d({c}, 6, 1)", "nn.Conv2d({c}, 4, 3, 2, 1, bias=False)",
    "nn.Conv2d({c}, {c}, 3, padding=1, groups={c})", "nn.ConvTranspose2d({c}, 4, 2, 2)", "nn.BatchNorm2d({c})",
    "nn.BatchNorm2d({c}, affine=False)", "nn.BatchNorm2d({c}, track_running_stats=False)",
    "nn.PReLU({c})", "nn.Sequential(nn.Conv2d({c}, 8, 1), nn.BatchNorm2d(8), nn.SiLU(inplace=True))",
    "nn.Conv2d({c}, {c}, 3, padding=2, dilation=2)", "nn.Dropout2d(0.2)", "nn.Conv2d({c}, {c}, 1, 2)",
    "nn.InstanceNorm2d({c}, affine=True, track_running_stats=True)", "nn.LocalResponseNorm(2)",
    "nn.Conv2d({c}, 4, 3, padding=1, padding_mode='circular')", "nn.Upsample(scale_factor=2, mode='bicubic')",
    "nn.AdaptiveMaxPool2d(2)", "nn.PixelShuffle(2)", "nn.ReflectionPad2d(1)", "nn.Unfold(2)",
    "nn.Hardswish(inplace=True)",
)  # fmt: skip
LAYERS = (
    "nn.Linear({n}, 5)", "nn.Linear({n}, {n}, bias=False)", "nn.LayerNorm({n})", "nn.RMSNorm({n})", "nn.PReLU()",
    "nn.Sequential(nn.Linear({n}, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, {n}))", "nn.Dropout(0.4)",
    "nn.utils.parametrizations.weight_norm(nn.Linear({n}, 5))", "nn.Conv1d({c}, 4, 3, padding=1)",
    "nn.utils.parametrizations.spectral_norm(nn.Linear({n}, 5))", "nn.BatchNorm1d({c})",
    "nn.GRU({n}, 4, batch_first=True)", "nn.MultiheadAttention({n}, 1, batch_first=True)",
    "nn.TransformerEncoderLayer({n}, 1, 8, 0.1, batch_first=True)",
)  # fmt: skip
#: Statements that write; "a" is a value. Eager torch's backward may refuse its writes.
WRITES = (
    "a.mul_(s)", "a.add_(1)", "a[..., 0] = s", "a[:, :1].mul_(2)", "a.relu_()", "a.masked_fill_(a > s, 0.25)",
    "a.zero_()", "a[0].add_(a[-1].detach())", "a.copy_(a.flip(0))", "a.clamp_(-1, 1)", "a += 1", "a *= s",
    "a.sigmoid_()", "F.silu(a, inplace=True)", "self.scale.add_(a.detach().mean())", "self.steps += 1",
    "self.scale = self.scale * 0.5 + a.detach().mean()", "self.scale.copy_(a.detach().amax())", "a.t_()",
    "a.unsqueeze_(0)", "a.transpose_(0, -1)", "a.sub_(a.detach().mean())", "a.index_fill_(0, torch.tensor([0]), s)",
    "a.select(-1, 0).fill_(s)", "a.view(-1)[:2].mul_(3)", "a[a > 1] = 0.5",
    "with torch.no_grad(): self.weight.mul_(0.9)", "with torch.no_grad(): a.mul_(s)",
    "self.table.data[0] = 0.5", "a.scatter_(0, torch.zeros_like(a[:1], dtype=torch.long), s)",
    "a.index_put_((torch.tensor([0]),), a[-1].detach())", "a.unbind(0)[0].mul_(s)",
    "a.addcmul_(a.detach(), self.scale)", "more['pair'][0].add_(1)", "self.calls += 1",
    "if a.requires_grad: a.register_hook(lambda g: g * 0.5)",
)  # fmt: skip
#: Contexts of a line.
CONTEXTS = (
    "torch.no_grad()", "torch.no_grad()", "torch.enable_grad()", "torch.autocast('cpu', dtype=torch.bfloat16)",
    "torch.autocast('cpu', enabled=False)",
)  # fmt: skip
MORE = (
    "a * more['factor']", "a + more['pair'][0]", "a * 2 if more['flag'] else -a", "(a * more['complex']).real",
    "a if more['pair'][1] is None else a * 3", "a.narrow(d, 0, min(n, more['size']))", "more['complex'].abs() + a",
    "torch.full_like(a, more['factor']) * a",
)  # fmt: skip
OTHERS = (
    "a * self.weight", "a * self.scale", "a + self.steps", "a * self.calls",
    "checkpoint(lambda t: torch.tanh(t * self.weight), a, use_reentrant=True) if a.requires_grad else a",
    "checkpoint(lambda t: torch.sigmoid(t) * t, a, use_reentrant=False)", "self.LAYER(a)", "self.LAYER(self.LAYER(a))",
    "checkpoint(self.LAYER, a, use_reentrant=False)", "F.linear(a, self.LAYER.weight)",
    "F.linear(a, self.LAYER.weight.t())",
    "checkpoint(lambda t: F.dropout(t.sigmoid(), 0.3, self.training) * t, a, use_reentrant=False)",
)  # fmt: skip
