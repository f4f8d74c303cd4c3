"""Values that a Python program can read besides its arguments, and their changes between two calls.

In the texts `$n` is a new name for the source and each `$v` a random number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A value that a program reads.

    Attributes:
        setup: lines that make it.
        reads: expressions for a number, or for a tensor that broadcasts to six elements.
        changes: lines, each of which may run between two calls.
        statements: lines of the function that read it, instead of an expression.
    """

    setup: str = ""
    reads: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()


_LAYER = """
class $nc(torch.nn.Module):
    scale = $v
    def __init__(self):
        super().__init__()
        self.a, self.table = $v, [1.5]
        self.w = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("b", torch.tensor(0.5))
        self.act = torch.nn.LeakyReLU(0.1)
        self.seq = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid())
        self.many = torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.Tanh()])
        self.named = torch.nn.ModuleDict({"one": torch.nn.Tanh()})
        self.ps = torch.nn.ParameterList([torch.tensor(0.5)])
    @property
    def p(self): return self.a
    def helper(self): return self.scale
    def forward(self, x):
        %s
        return x * self.a
$n = $nc()"""
_FORWARDS = (
    "x = self.act(x)", "x = self.seq(x)", "x = self.many[0](x)", "for layer in self.many: x = layer(x)",
    "x = x * self.p", "x = x * self.table[0]", "x = x + self.scale", "x = x if self.training else x * 2",
    "x = x * self.w", "x = x + self.b", "x = self.act(x) if self.a == 1 else x", "x = x * len(self.seq)",
    "x = x * self.helper()", "x = torch.nn.functional.dropout(x, 0.0, self.training)", "x = self.named['one'](x)",
    "x = x * (2.0 if isinstance(self.act, torch.nn.ReLU) else 3.0)", "x = x * (2.0 if self.w > 0 else 3.0)",
    "x = x * self.ps[0]", "x = x * sum(p.sum() for p in self.parameters())", "x = x * len(list(self.children()))",
    "x = x * getattr(self, 'extra', 1.5)", "x = x + (1.0 if hasattr(self, 'extra') else 0.5)",
)  # fmt: skip
_LAYER_CHANGES = (
    "$n.a = $v", "$nc.scale = $v", "$n.scale = $v", "$n.eval()", "$n.train()", "$n.act = torch.nn.ReLU()",
    "$n.act.negative_slope = $v", "$n.seq.append(torch.nn.Tanh())", "$n.seq[0] = torch.nn.Tanh()",
    "$n.many[0] = torch.nn.Sigmoid()", "$n.many.append(torch.nn.Sigmoid())", "$n.table[0] = $v",
    "$n.w = torch.nn.Parameter(torch.tensor(-0.5))", "$n.w.data.mul_(-1)", "$n.b.add_(1)", "$n.b = torch.tensor(2.5)",
    "$n.register_forward_hook(lambda m, given, made: made * $v)",
    "$n.register_forward_pre_hook(lambda m, given: (given[0] * $v,))", "$n._forward_hooks.clear()",
    "$n.forward = lambda x: x * $v", "$n.__dict__.pop('forward', None)",
    "$nc.forward = lambda self, x: x * self.a * $v", "$n = $nc()", "$n.helper = lambda: $v", "$n.double()",
    "$n.float()", "$n.w.requires_grad_(not $n.w.requires_grad)", "$n.extra = $v",
    "$n.named['one'] = torch.nn.ReLU()", "$n.ps[0] = torch.nn.Parameter(torch.tensor($v * 1.0))",
    "$nc.p = property(lambda self: $v)",
)  # fmt: skip
#: Properties of the call itself.
_CALL = (
    "(2.0 if torch.is_grad_enabled() else 3.0)", "(2.0 if torch.get_default_dtype() == torch.float32 else 3.0)",
    "(2.0 if x.requires_grad else 3.0)", "(2.0 if x.is_contiguous() else 3.0)", "x.shape[0]", "x.dim()",
    "(2.0 if x.dtype == torch.float64 else 3.0)", "x.stride()[0]", "x.size(-1)", "x.numel()", "len(x)",
    "(2.0 if x is y else 3.0)", "(2.0 if isinstance(x, torch.nn.Parameter) else 3.0)",
    "(2.0 if y is None else 1.5)", "(2.0 if k is None else 1.5)", "(k or 1.0)", "torch.ones(())",
    "(k if isinstance(k, float) else 0.5)", "(2.0 if type(k) is int else 3.0)", "torch.tensor(1.5)", "x.element_size()",
    "x.shape.numel()", "(2.0 if torch.is_inference_mode_enabled() else 1.0)", "torch.tensor(0.5).dtype.itemsize",
    "torch.finfo(x.dtype).eps", "(2.0 if torch.is_tensor(k) else 1.0)", "(2.0 if 'k' in locals() else 1.0)",
    "(2.0 if x.shape == torch.Size([2, 6]) else 3.0)", "(1.5 if x.is_leaf else 2.0)", "(2.0 if x._version else 1.0)",
)  # fmt: skip
#: Sizes of the call, passed to torch.
_SIZES = (
    "torch.arange(6.0) * x.shape[0]",
    "torch.ones(x.shape)",
    "torch.full((1,), 1.0 * len(x))",
    "torch.ones(6).expand(x.shape)",
    "torch.tensor(1.0 * x.dim())",
    "torch.linspace(-1, 1, 8)[x.shape[0]]",
    "torch.arange(x.shape[-1])",
    "x.new_full(x.shape, 0.5)",
    "torch.linspace(-1, 1, 12)[x.shape[0] :][:6]",
    "(torch.ones(6) if len(x) > 2 else torch.zeros(6))",
)

SOURCES: dict[str, Source] = {
    "the call": Source(reads=_CALL),
    "the call's sizes": Source(reads=_SIZES),
    "a number": Source(
        "$n = $v",
        ("$n", "globals()['$n']", "eval('$n')", "float(str($n * 1.0))", "float(f'{float($n)}')", "(lambda: $n)()",
         "[$n for _ in range(2)][1]", "max([$n, 0.1])"),
        ("$n = $v", "$n = $v"),
    ),
    "a dict": Source(
        "$n = {'k': $v, 'm': $v}",
        ("$n['k']", "$n.get('k', 0.5)", "$n.get('m', 0.5)", "sum($n.values())", "len($n)",
         "($n['m'] if 'm' in $n else 2.0)", "list($n.values())[0]", "[*$n.values()][-1]", "$n.get(list($n)[0])",
         "(lambda k=1.0, m=1.0, z=1.0: k - m + z)(**$n)", "sum(i * v for i, v in enumerate($n.values()))"),
        ("$n['k'] = $v", "$n['m'] = $v", "$n['k'] = $n.pop('k')", "$n = {'k': $v}", "$n['z'] = $v",
         "$n.pop('m', None)"),
    ),
    "containers in a dict": Source(
        "$n = {'k': {'a': $v}, 'l': [$v, $v]}",
        ("$n['k']['a']", "$n['l'][0]", "sum($n['l'])", "$n['l'][-1]"),
        ("$n['k']['a'] = $v", "$n['l'][0] = $v", "$n['l'].append($v)", "$n['k'] = {'a': $v}"),
    ),
    "a list": Source(
        "$n = [$v, $v]",
        ("$n[0]", "$n[-1]", "sum($n)", "len($n)", "sum(v * v for v in $n)", "max($n)", "(2.0 if 0.5 in $n else 3.0)",
         "sum(i * v for i, v in enumerate($n))", "any(v > 1 for v in $n)", "$n[::-1][0]",
         "(lambda *a: a[0] - a[-1])(*$n)", "sum(a - b for a, b in zip($n, reversed($n)))", "sorted($n)[0]",
         "min($n, key=lambda v: -v)", "next(iter($n))", "$n.count(1.0)"),
        ("$n[0] = $v", "$n.append($v)", "$n.reverse()", "$n.pop() if len($n) > 1 else None", "$n = [$v]", "$n.sort()",
         "$n[:] = [$v, 2.0]"),
    ),
    "a list in a tuple": Source("$n = ($v, [$v])", ("$n[0]", "$n[1][0]"), ("$n[1][0] = $v", "$n = ($v, [1.5])")),
    "a word": Source(
        "$n = 'relu'",
        ("(2.0 if $n == 'relu' else 3.0)", "len($n)", "(2.0 if $n.lower() == 'relu' else 3.0)",
         "(2.0 if $n.startswith('r') else 0.5)", "{'relu': 1.0}.get($n, 4.0)"),
        ("$n = 'tanh'", "$n = 'RELU'", "$n = 'sigmoid'"),
    ),
    "an object": Source(
        "class $nb:\n    q = $v\nclass $nc($nb):\n    a = $v\n    def __init__(self): self.b = $v\n"
        "    @property\n    def p(self): return self.b * 2\n    def m(self, k=1.0): return self.a + k\n"
        "    def __float__(self): return float(self.b)\n    def __len__(self): return int(abs(self.b)) + 1\n"
        "    def __bool__(self): return self.b > 1\n    def __call__(self, v): return v * self.b\n"
        "    def __rmul__(self, v): return v * self.b\n    def __eq__(self, other): return self.b > 1\n"
        "    def __getitem__(self, key): return self.b\n"
        "    def __getattr__(self, n):\n        if n.startswith('dyn'): return self.b\n"
        "        raise AttributeError(n)\n    @staticmethod\n    def s(): return $nc.a\n"
        "    @classmethod\n    def cm(cls): return cls.q\n$n = $nc()",
        ("$n.b", "$n.a", "$n.q", "$n.p", "$n.m()", "$n.m($v)", "float($n)", "len($n)", "(2.0 if $n else 0.5)",
         "$n(1.5)", "$n.dynx", "$n.s()", "$n.cm()", "$nc.a", "$nc.q", "getattr($n, 'extra', 0.5)", "$n[0]",
         "(1.5 if hasattr($n, 'extra') else 0.5)", "vars($n).get('a', 1.25)", "(2.0 if $n == 1 else 0.5)", "1.0 * $n"),
        ("$n.b = $v", "$nc.a = $v", "$n.a = $v", "$nb.q = $v", "$nc.q = $v", "$n.__dict__.pop('a', None)",
         "$n = $nc()", "$nc.m = lambda self, k=1.0: $v", "$nc.__call__ = lambda self, v: v * $v", "$nc.extra = $v"),
    ),
    "slots": Source(
        "class $nc:\n    __slots__ = ('b',)\n    def __init__(self, b): self.b = b\n$n = $nc($v)",
        ("$n.b",), ("$n.b = $v", "$n = $nc($v)"),
    ),
    "a data class": Source(
        "@dataclasses.dataclass\nclass $nc:\n    b: float = 1.0\n"
        "    d: list = dataclasses.field(default_factory=lambda: [0.5])\n"
        "    K: typing.ClassVar[float] = $v\n$n = $nc($v)",
        ("$n.b", "$n.d[0]", "$n.K", "$nc.K"),
        ("$n.b = $v", "$n.d[0] = $v", "$nc.K = $v", "$n = dataclasses.replace($n, b=$v)"),
    ),
    "a named tuple": Source(
        "$nc = collections.namedtuple('$nc', 'a b')\n$n = $nc($v, [$v])",
        ("$n.a", "$n[0]", "$n.b[0]", "$n[1][0]"), ("$n = $n._replace(a=$v)", "$n.b[0] = $v"),
    ),
    "a namespace": Source(
        "$n = types.SimpleNamespace(a=$v, b=types.SimpleNamespace(c=$v))",
        ("$n.a", "$n.b.c"), ("$n.a = $v", "$n.b.c = $v", "$n.b = types.SimpleNamespace(c=$v)"),
    ),
    "an enumeration": Source(
        "$ng = $v\nclass $nc(enum.Enum):\n    A = 1.5\n    B = 0.5\n    @property\n"
        "    def f(self): return $ng * self.value\n    def m(self): return $ng\n"
        "    def __call__(self, v): return v * $ng\n$n = $nc.A",
        ("$n.value", "$n.f", "$n.m()", "$n(2.0)", "(2.0 if $n is $nc.A else 3.0)", "$nc.A.value", "$nc.A.f", "len($nc)",
         "getattr($n, 'extra', 1.0)", "$nc['B'].value", "(2.0 if $n.name == 'A' else 3.0)"),
        ("$ng = $v", "$n = $nc.B", "$n = $nc.A", "$nc.m = lambda self: $v", "$n.extra = $v", "$nc.K = $v"),
    ),
    "an enumeration of integers": Source(
        "$ng = $v\nclass $nc(enum.IntEnum):\n    A = 2\n    B = 3\n    def m(self): return $ng\n"
        "    def __rmul__(self, v): return v * $ng\nclass $np(enum.IntFlag):\n    A = 1\n    B = 2\n"
        "$n, $nq = $nc.A, $np.A",
        ("$n", "$n.m()", "$n + 1", "int($n)", "1.0 * $n", "$nq", "int($nq | 4)", "(2.0 if $nq & 1 else 3.0)",
         "$nq.value"),
        ("$ng = $v", "$n = $nc.B", "$n = $nc.A", "$nq = $np.B", "$nq = 2"),
    ),
    "a module": Source(
        "$n = types.ModuleType('$n')\n$n.a, $n.d, $n.h = $v, {'k': $v}, lambda v: v * $v\n"
        "$n.sub = types.ModuleType('$n.sub')\n$n.sub.c = $v",
        ("$n.a", "$n.d['k']", "$n.sub.c", "$n.h(2.0)"),
        ("$n.a = $v", "$n.d['k'] = $v", "$n.sub.c = $v", "$n.h = lambda v: v * $v", "$n.__getattr__ = lambda n: $v",
         "$n.other = $v"),
    ),
    "closures": Source(
        "def $nm(v, w):\n    def inner(): return v\n    def deep(): return inner() + w[0]\n    def put(n):\n"
        "        nonlocal v\n        v = n\n    return deep, put, w\n$n, $ns, $nw = $nm($v, [$v])",
        ("$n()",), ("$ns($v)", "$nw[0] = $v", "$n, $ns, $nw = $nm($v, [$v])"),
    ),
    "defaults": Source(
        "def $n(v=0.5, *, k=$v): return v * k\n$n.scale = $v\ndef $no(v=2.0, *, k=1.0): return v - k",
        ("$n()", "$n($v)", "$n(k=$v)", "$n.scale"),
        ("$n.__defaults__ = ($v,)", "$n.__kwdefaults__ = {'k': $v}", "$n.__kwdefaults__['k'] = $v",
         "$n.__code__ = $no.__code__", "$n.scale = $v", "$n = lambda v=1.0, k=1.0: v + k * $v"),
    ),
    "a partial function": Source(
        "def $nf(v, k=1.0): return v * k\n$n = functools.partial($nf, 1.5, k=$v)",
        ("$n()", "$nf(0.5)"),
        ("$n = functools.partial($nf, $v, k=$v)", "$n.keywords['k'] = $v", "def $nf(v, k=1.0): return v + k"),
    ),
    "a cached function": Source(
        "$ng = $v\n@functools.lru_cache\ndef $n(v): return v * $ng", ("$n(2.0)",), ("$ng = $v", "$n.cache_clear()")
    ),
    "a decorated function": Source(
        "$ns = [$v]\ndef $nd(fn):\n    @functools.wraps(fn)\n    def inner(*a, **k): return fn(*a, **k) * $ns[0]\n"
        "    return inner\n@$nd\ndef $n(v): return v + 1",
        ("$n(0.5)",), ("$ns[0] = $v", "$n.__wrapped__ = lambda v: v"),
    ),
    "a fused function": Source(
        "$ng = $v\n@FUSE\ndef $n(x): return torch.sin(x) * $ng",
        changes=("$ng = $v", "$n = lambda x: x * $v"), statements=("x = $n(x)",),
    ),
    "NumPy": Source(
        "$n, $ns = np.array([$v, 2.0]), np.float32($v)",
        ("float($n[0])", "float($ns)", "float($n.sum())", "int($n.shape[0])", "$n[0].item()"),
        ("$n[0] = $v", "$ns = np.float64($v)", "$n = np.array([$v])"),
    ),
    "a tensor of no dimension": Source(
        "$n = torch.tensor($v * 1.0)",
        ("$n", "$n.item()", "float($n)", "(2.0 if $n > 0 else 3.0)", "($n * $n)", "torch.sigmoid($n)",
         "($n + 1 if $n.requires_grad else $n)", "(1.0 if $n.dtype == torch.float64 else 2.0)",
         "($n if bool($n) else $n + 1)", "$n.clamp(min=0)", "getattr($n, 'extra', 1.0)"),
        ("$n.data.fill_($v)", "$n = torch.tensor($v * 1.0)", "$n = torch.tensor($v * 1.0, dtype=torch.float64)",
         "$n.data.mul_(-1)", "$n = $n.detach().clone().requires_grad_()", "$n.extra = $v"),
    ),
    "a parameter": Source(
        "$n = torch.nn.Parameter(torch.linspace(-1, 1, 6) * $v)",
        ("$n", "$n[0]", "$n.sum()", "$n.mean().item()", "$n.shape[0]", "(2.0 if $n.requires_grad else 3.0)",
         "(2.0 if $n[0] > 0 else $n)", "$n.detach()", "$n.abs().max()", "$n[1:].sum()", "$n.numel()",
         "(2.0 if $n.is_leaf else 1.0)", "$n.view(-1)", "$n.exp()",
         "(1.0 if isinstance($n, torch.nn.Parameter) else 2.0)"),
        ("$n.data.mul_(-2)", "$n = torch.nn.Parameter(torch.linspace(0, 1, 6))",
         "$n.requires_grad_(not $n.requires_grad)", "$n.data = torch.ones(6)", "with torch.no_grad(): $n.add_(1)",
         "$n = $n.detach()", "$n = torch.nn.Parameter(torch.ones(1))"),
    ),
    "the environment": Source(  # each of two copies of a program has its own variable
        "os.environ[__name__ + '$n'] = '1.5'", ("float(os.environ.get(__name__ + '$n', '3.0'))",),
        ("os.environ[__name__ + '$n'] = '2.5'", "os.environ[__name__ + '$n'] = '0.5'",
         "os.environ.pop(__name__ + '$n', None)"),
    ),
    "a context variable": Source("$n = contextvars.ContextVar('$n', default=$v)", ("$n.get()",), ("$n.set($v)",)),
    "random numbers": Source(
        reads=("random.random()", "float(np.random.rand())", "torch.rand(()).item()", "torch.rand(())",
               "random.choice([1.0, 2.0])", "torch.randn(6)", "torch.randperm(6)"),
    ),
    "what counts": Source(
        "$n = [0]\ndef $na():\n    $n[0] += 1\n    return $n[0]\n$nb, $nq = iter(range(1, 10000)), 0\n"
        "def $nc():\n    global $nq\n    $nq += 1\n    return $nq\nclass $nd:\n    n = 0\n    def __call__(self):\n"
        "        self.n += 1\n        return self.n\n$ne = $nd()",
        ("$na()", "next($nb)", "$nc()", "$ne()"), ("$n[0] = 5",),
    ),
    "a caught exception": Source(
        "$nd = {}\ndef $n():\n    try:\n        return $nd['k']\n    except KeyError:\n        return 0.5",
        ("$n()",), ("$nd['k'] = $v", "$nd.clear()"),
    ),
    "a function": Source(
        "$n = torch.relu",
        changes=("$n = torch.sigmoid", "$n = lambda v: v * $v", "$n = torch.nn.functional.gelu", "$n = torch.nn.ReLU()",
                 "$n = torch.nn.LeakyReLU($v)"),
        statements=("x = $n(x)",),
    ),
    "a table of functions": Source(
        "$n = {'a': torch.relu, 'b': torch.sigmoid}",
        changes=("$n['a'] = torch.tanh", "$n = {'a': torch.sigmoid}", "$n['a'] = lambda v: v * $v"),
        statements=("x = $n['a'](x)", "for name in $n: x = $n[name](x)"),
    ),
    "a tensor that is written": Source(
        "$n = torch.zeros(6)", changes=("$n.zero_()",),
        statements=("$n.add_(1.0); x = x * $n", "$n[0] = $n[0] + 1; x = x + $n"),
    ),
}  # fmt: skip
#: The same for modules, as a line of their forward.
LAYERS: dict[str, Source] = {
    forward: Source(
        _LAYER % forward,
        ("$n.a", "$n.w", "(2.0 if $n.training else 3.0)", "len($n.seq)", "$n.table[0]"),
        _LAYER_CHANGES,
        ("x = $n(x)", "x = $n(x * 0.5)"),
    )
    for forward in _FORWARDS
}
