"""oneDNN's C API through ctypes: its structures, its numbers for kinds and attributes, its statuses as errors.

Source: include/oneapi/dnnl/dnnl_graph.h and dnnl_graph_types.h of oneDNN 3.2. The wheel ships no headers.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

from opgraph.errors import (
    DeviceError,
    InvalidArguments,
    InvalidDataType,
    InvalidGraph,
    InvalidGraphOp,
    InvalidShape,
    OpGraphError,
    Unimplemented,
)

MAX_DIMS = 12

#: dnnl_graph_op_kind_t in the header's order, without its prefix.
_KINDS = (
    "abs abs_backward add avg_pool avg_pool_backward batch_norm_training_backward batch_norm_forward_training "
    "batch_norm_inference bias_add bias_add_backward clamp clamp_backward concat convolution "
    "convolution_backward_data convolution_backward_weights conv_transpose conv_transpose_backward_data "
    "conv_transpose_backward_weights dequantize divide dynamic_dequantize dynamic_quantize elu elu_backward end exp "
    "gelu gelu_backward hard_swish hard_swish_backward interpolate interpolate_backward layer_norm "
    "layer_norm_backward leaky_relu log log_softmax log_softmax_backward matmul maximum max_pool max_pool_backward "
    "minimum mish mish_backward multiply prelu prelu_backward quantize reciprocal reduce_l1 reduce_l2 reduce_max "
    "reduce_mean reduce_min reduce_prod reduce_sum relu relu_backward reorder round sigmoid sigmoid_backward softmax "
    "softmax_backward softplus softplus_backward sqrt sqrt_backward square squared_difference static_reshape "
    "static_transpose subtract tanh tanh_backward type_cast wildcard hard_sigmoid hard_sigmoid_backward"
)
#: Number of a kind, by its name in lower case: the header writes `soft_max` as `softmax`, the op's name is SoftMax.
KIND = {name.replace("_", ""): number for number, name in enumerate(_KINDS.split())}

#: dnnl_graph_op_attr_t: each type of attribute has a range of numbers.
_ATTRS = {
    0x1: "alpha beta epsilon max min momentum",
    0x20: "scales",
    0x30: "axis begin_norm_axis groups",
    0x40: "axes dilations dst_shape kernel order output_padding pads_begin pads_end shape sizes src_shape strides "
    "weights_shape zps",
    0x60: "exclude_pad keep_dims keep_stats per_channel_broadcast special_zero transpose_a transpose_b use_affine "
    "use_dst",
    0x80: "auto_broadcast auto_pad coordinate_transformation_mode data_format mode qtype rounding_type weights_format",
}
ATTR = {name: first + i for first, names in _ATTRS.items() for i, name in enumerate(names.split())}

#: dnnl_data_type_t, only the values that the graph API of 3.2 takes.
DTYPE = {"f16": 1, "bf16": 2, "f32": 3, "s32": 4, "s8": 5, "u8": 6, "boolean": 8}
PROPERTY = {"undef": 0, "variable": 1, "constant": 2}
STRIDED = 2
POLICY = {"fusion": 1, "debug": 2}
CPU = 1

_STATUS: tuple[tuple[str, type[OpGraphError]], ...] = (
    ("success", OpGraphError),
    ("out of memory", DeviceError),
    ("invalid arguments", InvalidArguments),
    ("unimplemented", Unimplemented),
    ("last implementation reached", Unimplemented),
    ("runtime error", DeviceError),
    ("not required", Unimplemented),
    ("invalid graph", InvalidGraph),
    ("invalid graph op", InvalidGraphOp),
    ("invalid shape", InvalidShape),
    ("invalid data type", InvalidDataType),
)

Dims = c_int64 * MAX_DIMS


class CLogicalTensor(ctypes.Structure):
    """dnnl_graph_logical_tensor_t; its union of strides and layout id is `strides`."""

    _fields_ = (
        ("id", c_size_t),
        ("ndims", c_int),
        ("dims", Dims),
        ("data_type", c_int),
        ("property", c_int),
        ("layout_type", c_int),
        ("strides", Dims),
    )


class InplacePair(ctypes.Structure):
    """dnnl_graph_inplace_pair_t."""

    _fields_ = (("input_id", c_size_t), ("output_id", c_size_t))


class Version(ctypes.Structure):
    """dnnl_version_t."""

    _fields_ = (
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    )


_LT = POINTER(CLogicalTensor)
_LTS = POINTER(_LT)
_ONE = POINTER(c_void_p)
_SIZE = POINTER(c_size_t)
#: Bits of dnnl_cpu_isa_t; each one has arithmetic on the dtype: AVX2 VNNI 2, and AVX-512 or its FP16 part.
ISA_OF = {"bf16": 0x10 | 0x20, "f16": 0x10 | 0x100}

#: Argument types by function; without them a handle would be truncated to an int. Every function returns a status.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "engine_create": (_ONE, c_int, c_size_t),
    "engine_destroy": (c_void_p,),
    "stream_create": (_ONE, c_void_p, ctypes.c_uint),
    "stream_destroy": (c_void_p,),
    "stream_wait": (c_void_p,),
    "graph_graph_create": (_ONE, c_int),
    "graph_graph_destroy": (c_void_p,),
    "graph_add_op": (c_void_p, c_void_p),
    "graph_graph_finalize": (c_void_p,),
    "graph_graph_filter": (c_void_p, c_int),
    "graph_graph_get_partition_num": (c_void_p, _SIZE),
    "graph_graph_get_partitions": (c_void_p, c_size_t, _ONE),
    "graph_op_create": (_ONE, c_size_t, c_int, c_char_p),
    "graph_op_destroy": (c_void_p,),
    "graph_op_add_input": (c_void_p, _LT),
    "graph_op_add_output": (c_void_p, _LT),
    "graph_op_set_attr_f32": (c_void_p, c_int, c_void_p, c_size_t),
    "graph_op_set_attr_s64": (c_void_p, c_int, c_void_p, c_size_t),
    "graph_op_set_attr_bool": (c_void_p, c_int, c_void_p, c_size_t),
    "graph_op_set_attr_str": (c_void_p, c_int, c_char_p, c_size_t),
    "graph_partition_destroy": (c_void_p,),
    "graph_partition_get_op_num": (c_void_p, _SIZE),
    "graph_partition_get_ops": (c_void_p, c_size_t, _SIZE),
    "graph_partition_is_supported": (c_void_p, POINTER(ctypes.c_uint8)),
    "graph_partition_get_input_ports_num": (c_void_p, _SIZE),
    "graph_partition_get_input_ports": (c_void_p, c_size_t, _LT),
    "graph_partition_get_output_ports_num": (c_void_p, _SIZE),
    "graph_partition_get_output_ports": (c_void_p, c_size_t, _LT),
    "graph_partition_compile": (c_void_p, c_void_p, c_size_t, _LTS, c_size_t, _LTS, c_void_p),
    "graph_compiled_partition_create": (_ONE, c_void_p),
    "graph_compiled_partition_destroy": (c_void_p,),
    "graph_compiled_partition_query_logical_tensor": (c_void_p, c_size_t, _LT),
    "graph_compiled_partition_get_inplace_ports": (c_void_p, _SIZE, POINTER(POINTER(InplacePair))),
    "graph_compiled_partition_execute": (c_void_p, c_void_p, c_size_t, _ONE, c_size_t, _ONE),
    "graph_tensor_create": (_ONE, _LT, c_void_p, c_void_p),
    "graph_tensor_destroy": (c_void_p,),
}


def checked(status: int, what: str, where: str) -> None:
    """Raises the error for a status other than success."""
    if status == 0:
        return
    name, error = _STATUS[status] if 0 <= status < len(_STATUS) else (f"status {status}", DeviceError)
    raise error(f"oneDNN's library says: {name}", where=f"{what}: {where}", fix="build what the library supports")
