"""The table of PyTorch's database calls that opgraph refuses or computes differently from eager torch, with reasons.

A fused function takes pointwise arithmetic only, and its error says so for everything else. A fused module leaves other
ops to torch and refuses nothing. A refusal without a row here is a finding of the sweep. The rows at the end are about
results: those that torch.compile itself gives with its backend "aot_eager", and those where another answer is right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opinfo_verdict import Finding

_NO_OP = "opgraph knows no op for it"
#: Ways that go through torch.compile.
CAPTURED = ("module", "compile", "sizes")


@dataclass(frozen=True)
class Refusal:
    """A row.

    Attributes:
        says: a regular expression that matches the first line of the error or of the difference.
        reason: the reason for the refusal.
        ops: names of ops; file name patterns are allowed.
        forms: forms of the calls; empty for all.
        ways: ways of capture.
        kind: the kind of the finding.
    """

    says: str
    reason: str
    ops: str = "*"
    forms: tuple[str, ...] = ()
    ways: tuple[str, ...] = ("function",)
    kind: str = "refused"

    def lists(self, finding: Finding) -> bool:
        """True if this row is about the finding."""
        return (
            finding.kind == self.kind
            and finding.way in self.ways
            and (not self.forms or finding.form in self.forms)
            and re.search(self.says, finding.text.partition("\n")[0]) is not None
            and any(fnmatchcase(finding.op, name) for name in self.ops.split())
        )


TABLE: tuple[Refusal, ...] = (
    Refusal(
        r"writes into an argument of the fused function",
        "a fused function computes new tensors; what it is given stays as it is",
        forms=("in place", "in place operator"),
    ),
    Refusal(
        r"\(out=\.\.\.\) writes into a tensor that was there before",
        "a fused function computes new tensors",
    ),
    Refusal(
        "its result has a layout in memory of its own",
        "kernels lay results out as their arguments are, in any other way torch does",
        "bfloat16 bool byte cdouble cfloat chalf char clone contiguous double float half int long short to",
    ),
    Refusal(
        "a reduction over data is no pointwise function",
        "each result needs many elements; reductions stand outside of the function",
        "all amax amin aminmax any argmax argmin count_nonzero cum* kthvalue log_softmax* logsumexp masked_* mean "
        "median nan* nn_functional_batch_norm* nn_functional_*_norm nn_functional_normalize nn_functional_softmin* "
        "norm* prod softmax* sort std* sum topk var*",
    ),
    Refusal(
        r"only (maximum\|max|minimum\|min)\(input, other\) is pointwise",
        "max and min of one tensor are reductions",
        "max_reduction_* min_reduction_*",
    ),
    Refusal(
        "it is no pointwise function; a library runs it better",
        "products, convolutions, attention",
        "__rmatmul__ *addmm* addmm_decomposed *bmm* dot einsum linalg_pinv_singular matmul mm mv pca_lowrank outer "
        "svd_lowrank tensordot nn_functional_bilinear nn_functional_conv?d nn_functional_embedding "
        "nn_functional_linear nn_functional_scaled_dot_product_attention",
    ),
    Refusal(
        "it draws random numbers",
        "backward would draw others",
        "bernoulli normal_in_place uniform rand*_like nn_functional_*dropout* nn_functional_rrelu",
    ),
    Refusal(
        "cannot read the values of its data",
        "the result is Python's, or has a shape that depends on the data",
        "allclose equal item nonzero unique",
    ),
    Refusal(
        "it is applied to a computed value",
        "values of a fused function have no memory to be viewed; views of arguments come first",
        "T mT t __getitem__ chunk diagonal flatten linalg_pinv_singular masked_* "
        "movedim narrow nn_functional_glu nn_functional_prelu pca_lowrank permute ravel reshape* rot90 select "
        "split* squeeze* svd_lowrank tensor_split transpose unbind unflatten unsqueeze view*",
    ),
    Refusal(
        "opgraph has no op for these arguments|Trigamma has no gradient",
        "polygamma of n > 1 has no op, and each derivative is the next order: each needs a series of its own "
        "to be right to 3 ulp (torch's is right to 1e-9)",
        "digamma polygamma_* special_polygamma_*",
    ),
    Refusal(
        "(Erfcx|I0eSlope|I1e) has no gradient",
        "their derivatives are no ops, and differences of the ops that there are cancel: that of I1e is off by 5.2 ulp "
        "in float32, where 3 are allowed",
        "erfinv special_i0e special_i1 special_i1e special_log_ndtr special_ndtri",
    ),
    Refusal(
        r"of bool cannot be fused",
        "opgraph's op is of numbers alone",
        "clamp_max isfinite isinf isnan isneginf isposinf",
    ),
    Refusal(r"of int16 cannot be fused", "opgraph has no integers of 16 bits"),
    Refusal(r"of complex(64|128) cannot be fused", "opgraph has no complex numbers", "addcdiv addcmul where"),
    # The errors below have the same words but different reasons.
    Refusal(
        _NO_OP,
        "linear algebra: a library's work",
        "linalg_* cholesky* lu lu_* qr svd geqrf ormqr pinverse triangular_solve logdet matrix_exp addbmm addmm "
        "addmm_decomposed addmv addr baddbmm corrcoef cov cross inner kron vdot trace cdist dist sparse_* "
        "nn_functional_pdist nn_functional_pairwise_distance nn_functional_cosine_similarity",
    ),
    Refusal(_NO_OP, "Fourier transforms: a library's work", "fft_* stft"),
    Refusal(
        _NO_OP,
        "reductions, scans and searches",
        "cummax cummin cumprod cumsum cumulative_trapezoid logcumsumexp trapezoid trapz diff gradient mode msort "
        "argsort nanmedian masked_median masked_norm masked_normalize nanquantile quantile bincount renorm histc "
        "histogram* bucketize searchsorted isin hash_tensor unique_consecutive _segment_reduce_* "
        "_softmax_backward_data torch_ops_aten__safe_softmax_default native_* _batch_norm_with_update "
        "_native_batch_norm_legit nn_functional_local_response_norm",
    ),
    Refusal(
        _NO_OP,
        "losses: they end in a reduction",
        "nn_functional_*_loss nn_functional_*cross_entropy* nn_functional_kl_div",
    ),
    Refusal(
        _NO_OP,
        "each result reads neighbours: pooling, resampling, transposed convolutions, windows",
        "nn_functional_*pool?d* nn_functional_*unpool* max_pool2d_with_indices_backward nn_functional_interpolate_* "
        "nn_functional_upsample_* _upsample_bilinear2d_aa grid_sampler_?d nn_functional_grid_sample "
        "nn_functional_conv_transpose?d nn_functional_unfold",
    ),
    Refusal(
        _NO_OP,
        "attention and embedding bags: a library's work",
        "nn_functional_multi_head_attention_forward nn_functional_embedding_bag",
    ),
    Refusal(
        _NO_OP,
        "elements are found by an index or a mask",
        "unravel_index gather index_* put take take_along_dim scatter* masked_scatter masked_select "
        "_unsafe_masked_index* nonzero_static argwhere select_scatter slice_scatter diagonal_scatter "
        "as_strided_scatter repeat_interleave nn_functional_one_hot one_hot",
    ),
    Refusal(
        _NO_OP,
        "data are moved: joined, padded, repeated, turned, cut",
        "cat _chunk_cat stack ?stack column_stack block_diag broadcast_tensors cartesian_prod combinations meshgrid_* "
        "constant_pad_nd nn_functional_pad_* repeat tile tril triu diag diag_embed diagflat "
        "nn_functional_pixel_* nn_functional_channel_shuffle slice ?split unsafe_split unsafe_chunk atleast_?d "
        "squeeze* unsqueeze sum_to_size *_copy",
    ),
    Refusal(
        _NO_OP,
        "it is about memory, not numbers",
        "as_strided* empty_like new_empty new_empty_strided resize_* fill zero_ to_sparse resolve_*",
    ),
    Refusal(_NO_OP, "views that the table of views does not have, or in place", "H mH t transpose unfold"),
    Refusal(
        _NO_OP,
        "complex numbers",
        "angle cdouble cfloat chalf complex conj* isreal polar real view_as_complex",
    ),
    Refusal(
        _NO_OP,
        "random numbers",
        "cauchy exponential geometric log_normal multinomial normal normal_number_mean",
    ),
    Refusal(
        _NO_OP,
        "special functions that no op of opgraph means",
        "special_* igamma igammac mvlgamma_*",
    ),
    Refusal(
        _NO_OP,
        "pointwise, and no op of opgraph means it yet",
        "frexp gcd lcm ldexp nextafter isclose",
    ),
    Refusal(
        _NO_OP,
        "as operators (1 - x) they are fused; as functions of these names nobody calls them",
        "__rdiv__ __rmod__ __rpow__ __rsub__",
    ),
    Refusal(_NO_OP, "opgraph has no integers of 16 bits", "short"),
    # Behavior of torch.compile, with any backend.
    Refusal(
        "shape of argument 0 afterwards",
        "Dynamo breaks the graph at an in-place view of an argument, and where another call stands before it, the view "
        "is lost",
        "as_strided* squeeze* swapaxes t transpose unsqueeze",
        forms=("in place",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "captures nothing of it|no graph was captured",
        "Dynamo leaves a call of these to torch where it stands by itself: in-place views of arguments",
        "as_strided* squeeze* swapaxes t transpose unsqueeze resize_*",
        forms=("in place",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "^value of (result|argument 0 afterwards)",
        "AOTAutograd draws into contiguous memory: of elements that lie otherwise, the numbers are others",
        "normal_in_place",
        forms=("call", "in place"),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "^value of result",
        "torch's decompositions, which AOTAutograd takes, compute positions in 16 bits, and weigh neighbours of uint8 "
        "in other steps than eager's kernels",
        "nn_functional_grid_sample nn_functional_interpolate_bi* nn_functional_upsample_bilinear",
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "Found a custom .non-ATen. operator whose output has alias annotations: aten::polygamma_",
        "AOTAutograd has no functional form of polygamma_",
        "polygamma_* special_polygamma_*",
        forms=("in place",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "the requested shape has too few dimensions|shape of result 0",
        "AOTAutograd gives the results of _native_batch_norm_legit(out=) each other's shapes",
        "_native_batch_norm_legit",
        forms=("out",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "value of result",
        "AOTAutograd does not write into the out= of matrix_rank",
        "linalg_matrix_rank*",
        forms=("out",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "shape of result: torch.Size..1.., in torch torch.Size",
        "torch's rule for tensors without data gives the loss of one sample a dimension",
        "nn_MultiLabelMarginLoss nn_functional_multilabel_margin_loss",
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "captures nothing of it",
        "Dynamo leaves to torch, with a warning: recurrent layers, and modules whose only graph breaks in torch's own "
        "files, where they read a number from a tensor",
        "nn_RNN nn_LSTM nn_GRU nn_BatchNorm?d nn_LazyBatchNorm?d nn_GaussianNLLLoss nn_CTCLoss "
        "nn_functional_gaussian_nll_loss nn_functional_ctc_loss",
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "can't be cast to the desired output type",
        "torch's rules for tensors without data let integers take the floats of ldexp_ and logit_",
        "ldexp logit",
        forms=("in place",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "^strides of result",
        "AOTAutograd writes these as functions of new tensors, and their results lie as new ones do: in C order",
        "*addbmm addmm* baddbmm cumprod cumsum index_* masked_fill masked_scatter mvlgamma_* renorm scatter* tril triu",
        forms=("in place",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "^strides of result",
        "torch's decomposition, which AOTAutograd takes, gives the axes another order in memory than eager's kernel",
        "nn_functional_interpolate_nearest* nn_functional_upsample_nearest",
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "writes into an expanded tensor runs unfused",
        "torch.compile refuses the write or loses it (`known_faults`)",
        "masked_fill index_fill index_put zero_",
        forms=("in place",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "Attempted to call op with non-contiguous .out=. list of tensors",
        "Dynamo leaves such a call to torch",
        "_native_batch_norm_legit",
        forms=("out",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "Attempted to wrap sparse Tensor",
        "Dynamo takes no sparse tensors that have gradients",
        "sparse_sampled_addmm",
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "self.is_contiguous.. INTERNAL ASSERT",
        "eager torch fails where the gradient of as_strided_scatter has axes in another order",
        "as_strided_scatter",
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "^value of result 0",
        "where axes have another order, native_batch_norm(out=) of eager torch gives other results than without out=",
        "native_batch_norm",
        forms=("out",),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "cannot capture it: RuntimeError when making fake tensor call",
        "torch's rules for tensors without data refuse what its kernels take: an out= that is not contiguous, expanded "
        "tensors that are written into",
        "view_copy baddbmm conj_physical nn_functional_threshold tril triu",
        forms=("out", "in place"),
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "no graph was captured",
        "Dynamo takes no sparse tensors",
        "sparse_sampled_addmm",
        ways=("compile", "sizes"),
        kind="not compiled",
    ),
    Refusal(
        "multinomial expects Long tensor out",
        "torch's rule for tensors without data takes an out= of any dtype",
        "multinomial",
        ways=CAPTURED,
        kind="torch.compile",
    ),
    Refusal(
        "runs unfused: aten._unique.default",
        "torch's gradient by the value of index_fill has a step whose size depends on data, which AOTAutograd refuses",
        "index_fill",
        ways=CAPTURED,
        kind="unfused",
    ),
    Refusal(
        "runs unfused: aten.fractional_max_pool3d_backward.default",
        "torch has no rule for the gradient of fractional_max_pool3d on tensors of any size",
        "nn_functional_fractional_max_pool3d",
        ways=("sizes",),
        kind="unfused",
    ),
    Refusal(
        "TorchRuntimeError: RuntimeError when making fake tensor call",
        "torch's rules for tensors of any size refuse an out= of these, and this gradient, with any backend",
        "angle gather index_reduce* max_pool2d_with_indices_backward randn scatter scatter_add take_along_dim",
        ways=("sizes",),
        kind="raw error",
    ),
    # Harmless differences.
    Refusal(
        "self.is_contiguous.. INTERNAL ASSERT",
        "eager torch fails where the gradient of as_strided_scatter lies otherwise than in C order",
        "as_strided_scatter",
        ways=CAPTURED,
        kind="answered",
    ),
    Refusal(
        "strides of result",
        "torch's rules for tensors without data, by which results are laid out (Inductor's, too), order the axes "
        "otherwise than torch's kernels do",
        "copysign div_floor_rounding floor_divide nn_functional_channel_shuffle nn_functional_max_unpool?d* normal",
        ways=CAPTURED,
        kind="wrong",
    ),
    Refusal(
        "value of second derivative .: .*: -?0.0, in torch nan",
        "an element that is masked out has the gradient 0 whatever the cotangent is; eager multiplies that 0 by NaN",
        "masked_logaddexp",
        kind="wrong",
    ),
    Refusal(
        "Expected X.is_contiguous|grad_input must be contiguous",
        "torch's kernel takes contiguous inputs alone; decomposed, the op computes of any input what it would be",
        "native_group_norm nn_functional_nll_loss",
        ways=CAPTURED,
        kind="answered",
    ),
    Refusal(
        "a graph of .* runs unfused: n=copy_",
        "decomposed, native_batch_norm(out=) writes into running statistics that are computed values: torch runs it",
        "native_batch_norm",
        forms=("out",),
        ways=CAPTURED,
        kind="unfused",
    ),
)


def listed(finding: Finding) -> Refusal | None:
    """The row that lists a refusal; None if there is none."""
    return next((row for row in TABLE if row.lists(finding)), None)
