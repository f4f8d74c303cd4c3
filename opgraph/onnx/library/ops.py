"""The contents of a library: its ops, the forms of each op, and the kernels of each form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opgraph.codegen.emit import emit_functor
from opgraph.codegen.rows import emit_rows
from opgraph.errors import OpGraphError
from opgraph.ir import dtypes, opdef
from opgraph.ir.logical_tensor import LogicalTensor
from opgraph.loops.axis_splits import has_cuts
from opgraph.loops.layout import CONTIGUOUS, ROW, STRIDED, UNIFORM, Variant
from opgraph.loops.loop import Axes, Load, Loop, Statement, Store
from opgraph.loops.lower import Lowered, lower
from opgraph.loops.verify import verify_loop
from opgraph.partition.partition import FUSED, Partition
from opgraph.runtime.operands import Operands
from opgraph.schedule.schedule import INNER

#: The input number that stands for the node's attribute alpha; kernels/ort/call.h: attribute.
ALPHA = 255
#: kernels/ort/dense.h: dense_operands.
MAX_OPERANDS = 64
#: With at most this many operands, there is a kernel for every combination of operand kinds.
_FEW = 2
SWISH = "Swish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to call an op.

    Attributes:
        inputs: the number of inputs that a node gives.
        loop: the computation.
        reads: for each load, the input that it reads, or ALPHA.
        kinds: operand kinds of each kernel, as in `opgraph.loops.layout.Variant`; the first that fits a call is used.
        moderate: a functor of kernels/ort/swish.h for the usual alphas; "" for none.
    """

    inputs: int
    loop: Loop
    reads: tuple[int, ...]
    kinds: tuple[str, ...]
    moderate: str = ""

    @property
    def row_rank(self) -> int:
        """The number of last axes that form a row; 0 if rows are not reduced."""
        return len(self.loop.row_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryOp:
    """An op with one name and one signature; each further signature of a name is another LibraryOp.

    Attributes:
        name: in domain `opgraph`.
        inputs, outputs: dtypes.
        least: the minimum number of inputs.
        has_alpha: True if nodes have the attribute alpha.
        on_gpu: True if onnxruntime's CUDA provider runs it, too.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    least: int
    has_alpha: bool
    forms: tuple[Form, ...]
    on_gpu: bool = False


def swish_ops() -> tuple[LibraryOp, ...]:
    """`opgraph::Swish` for every float dtype: any alpha, with and without a factor, which may be broadcast."""
    return tuple(
        LibraryOp(
            name=SWISH,
            inputs=(dtype, dtype),
            outputs=(dtype,),
            least=1,
            has_alpha=True,
            forms=(_swish(dtype, factor=False), _swish(dtype, factor=True)),
        )
        for dtype in dtypes.FLOATS
    )


def _swish(dtype: str, *, factor: bool) -> Form:
    """The form of Swish. alpha is an f32 attribute for every dtype: it is read as f32, not rounded to f16."""
    given = [Load(name="x0", dtype=dtype), *([Load(name="x1", dtype=dtype)] if factor else [])]
    alpha = Load(name=f"x{len(given)}", dtype="f32")
    work = "f64" if dtype == "f64" else "f32"
    statements = [Statement(result="t0", dtype=work, kind="TypeCast", args=(alpha.name,))]
    if factor:
        statements.append(Statement(result="t1", dtype=work, kind="Multiply", args=("x1", "t0")))
    attrs = tuple(sorted(opdef.get(SWISH, where="library").default_attrs().items()))
    last = len(statements)
    statements.append(
        Statement(result=f"t{last}", dtype=dtype, kind=SWISH, args=("x0", f"t{last - 1}"), attrs=attrs, tag=0)
    )
    loop = Loop(
        axes=(Axes(kind="parallel"),),
        loads=(*given, alpha),
        statements=tuple(statements),
        stores=(Store(value=f"t{last}", dtype=dtype),),
    )
    kinds = tuple(f"{ways}{UNIFORM}{CONTIGUOUS}" for ways in _every_way(len(given)))
    return Form(
        inputs=len(given),
        loop=verify_loop(loop),
        reads=(*range(len(given)), ALPHA),
        kinds=kinds,
        moderate="" if factor or dtype == "f64" else f"og::ModerateSwish<{dtypes.get(dtype).storage}>",
    )


def fused_op(name: str, part: Partition, inputs: Mapping[int, int], outputs: Sequence[int]) -> LibraryOp | None:
    """A fused partition as an op; None if the kernels of a library do not support it.

    Args:
        inputs: tensor id -> position among the node's inputs, constants with dimensions included.
        outputs: the tensor ids of the node's outputs, in order.
    """
    lowered = _lowered(part)
    if lowered is None or set(outputs) != {t.id for t in lowered.stores}:
        return None
    tensors: list[LogicalTensor] = [t for t in lowered.loads if t is not None]
    if any(t.id not in inputs for t in tensors) or len(tensors) + len(outputs) > MAX_OPERANDS:
        return None
    place = {t.id: i for i, t in enumerate(lowered.stores)}
    stores = tuple(lowered.loop.stores[place[id_]] for id_ in outputs)
    loop = verify_loop(
        Loop(axes=lowered.loop.axes, loads=lowered.loop.loads, statements=lowered.loop.statements, stores=stores)
    )
    dtype_of = {inputs[t.id]: t.dtype for t in (*part.input_ports, *part.constants) if t.id in inputs}
    count = max(inputs.values(), default=-1) + 1
    if sorted(dtype_of) != list(range(count)):
        return None
    kinds = _kinds(lowered, part)
    form = Form(inputs=count, loop=loop, reads=tuple(inputs[t.id] for t in tensors), kinds=kinds)
    return LibraryOp(
        name=name,
        inputs=tuple(dtype_of[i] for i in range(count)),
        outputs=tuple(s.dtype for s in stores),
        least=count,
        has_alpha=False,
        forms=(form,),
    )


def _lowered(part: Partition) -> Lowered | None:
    """The loop of a partition if it is elementwise, or reduces rows along the last axes, and its operands are dense."""
    records = [opdef.get(op.kind, where="library") for op in part.ops]
    if part.kind != FUSED or any(record.index_of or record.by_position for record in records):
        return None
    try:
        lowered = lower(part)
    except OpGraphError:
        return None
    loop, rank = lowered.loop, len(lowered.loop.row_axes)
    last = tuple(sorted(loop.row_axes)) == tuple(range(-rank, 0))
    dense = all(x.align in ("right", "channel") for x in loop.loads) and all(lowered.loads) and not has_cuts(loop)
    return lowered if last and dense and not loop.has_sums and loop.reads() & {x.name for x in loop.loads} else None


def _kinds(lowered: Lowered, part: Partition) -> tuple[str, ...]:
    """Operand kinds of a loop's kernels: as declared, all with the results' shape, and with any strides."""
    loop = lowered.loop
    used = loop.reads()
    read = [x.name in used for x in loop.loads]
    stores = "".join(ROW if s.per_row else CONTIGUOUS for s in loop.stores)
    anyhow = "".join(STRIDED if r else UNIFORM for r in read) + stores
    if all(read) and len(read) <= _FEW and not loop.row_axes:
        return tuple(f"{ways}{stores}" for ways in _every_way(len(read)))
    found = ["".join(CONTIGUOUS if r else UNIFORM for r in read) + stores]
    tensors = [*part.input_ports]
    layout = Operands(lowered, tensors).probable_layout([t.dims for t in tensors])
    if layout is not None and STRIDED not in layout.variant.operands and layout.size > 1:
        kinds = zip(layout.variant.operands, read)  # of loads; the kinds of stores follow
        probable = "".join((ROW if k == UNIFORM else k) if r else UNIFORM for k, r in kinds) + stores
        found.insert(0, probable)
    return tuple(dict.fromkeys([*found, anyhow]))


def _every_way(count: int) -> list[str]:
    """Combinations of kinds of dense operands, at least one with the results' shape; ROW includes single values."""
    ways = ["".join(kinds) for kinds in itertools.product((CONTIGUOUS, ROW), repeat=count)]
    return [way for way in ways if CONTIGUOUS in way]


def functor_of(form: Form, kinds: str) -> str:
    """The emitted text of one kernel."""
    variant = Variant(kinds, flat=False)
    functor = emit_rows(form.loop, variant, INNER) if form.row_rank else emit_functor(form.loop, variant, packs=False)
    return functor.code
