"""Functions that cannot be fused, with the reason that fits."""

from __future__ import annotations

from typing import Any, NoReturn

from opgraph.torch.tracing import trace_errors
from opgraph.torch.tracing.expansions import is_view
from opgraph.torch.tracing.metadata_queries import LAYOUT
from opgraph.torch.tracing.proxy import Proxy

#: Functions for which Python needs the values.
_READS = frozenset(
    (
        "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "item", "tolist", "numpy",
        "is_nonzero", "equal", "allclose", "nonzero", "unique", "__contains__", "data_ptr", "__format__",
    )
)  # fmt: skip
_REDUCES = frozenset(
    (
        "sum", "mean", "prod", "amax", "amin", "aminmax", "max", "min", "any", "all", "argmax", "argmin", "norm", "var",
        "std", "var_mean", "std_mean", "logsumexp", "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "sort",
        "median", "layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "normalize", "nansum",
        "nanmean", "count_nonzero", "topk", "kthvalue", "vector_norm",
    )
)  # fmt: skip
_PRODUCTS = frozenset(
    (
        "matmul", "mm", "bmm", "linear", "conv1d", "conv2d", "conv3d", "einsum", "dot", "addmm", "baddbmm",
        "__matmul__", "__rmatmul__", "bilinear", "outer", "mv", "tensordot", "embedding",
        "scaled_dot_product_attention",
    )
)  # fmt: skip
_RANDOM = frozenset(
    (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu",
        "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "normal_", "uniform_", "gumbel_softmax",
    )
)  # fmt: skip
_GRADIENTS = frozenset(
    ("grad", "grad_fn", "requires_grad_", "backward", "register_hook", "retain_grad", "is_leaf", "_version", "_grad")
)


def refuse(name: str, args: tuple[Any, ...]) -> NoReturn:
    """Raises the error for a function that opgraph does not fuse.

    Raises:
        InvalidArguments: it needs the values of data.
        Unimplemented: everything else.
    """
    outside = trace_errors.OUTSIDE
    if name in _READS:
        raise trace_errors.branch_on_data(name)
    if name in _REDUCES:
        raise trace_errors.unknown(name, "a reduction over data is no pointwise function", outside)
    if name in _PRODUCTS:
        raise trace_errors.unknown(name, "it is no pointwise function; a library runs it better", outside)
    if name in _RANDOM:
        raise trace_errors.random(name)
    if name in _GRADIENTS:
        raise trace_errors.unknown(
            name, "inside, no tensor has a gradient yet", "use it on the arguments or on the result"
        )
    if name in LAYOUT:
        raise trace_errors.unknown(name, "where a computed value will lie in memory is not known", "ask the arguments")
    if name == "__setitem__":
        raise trace_errors.unknown(
            "x[...] = y", "it writes into a part of a tensor", "use torch.where(condition, y, x)"
        )
    if is_view(name) and args and isinstance(args[0], Proxy):
        raise trace_errors.view(name)
    raise trace_errors.unknown(name, "opgraph knows no op for it", outside)
