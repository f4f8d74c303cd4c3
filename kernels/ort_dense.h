#pragma once
#include "host.h"

// Where dense operands stand in the space that they broadcast to: what opgraph/loops/layout.py does in Python, for a
// library that has to do it without. Operands are row-major, so along the innermost axis each one stands still or runs on.

namespace og {

enum { dense_rank = 32, dense_operands = 64 };

// How an operand's dimensions meet the space: from the right, as in NumPy, or one dimension along axis 1. Where only the
// shape of an operand counts, its place does not.
struct DenseLoad {
  u8 input;
  bool channel, read;
};

struct DenseShape {
  i64 rank;
  i64 dims[dense_rank];
};

struct DenseLayout {
  DenseShape shape;  // of the space before collapsing, and of every result
  i64 rank, size;
  i64 dims[dense_rank];
  i64 strides[dense_operands * dense_rank];  // as og::Space has them: those of operand k from k * rank on
  char kinds[dense_operands];                // u, r or c of each operand
};

OG_FN bool along_channel(const DenseLoad& load, const DenseShape& shape) { return load.channel && shape.rank == 1; }

// The space of these operands; false where they do not broadcast.
inline bool dense_space(const DenseLoad* loads, i64 count, const DenseShape* shapes, DenseShape* space) {
  space->rank = 0;
  for (i64 k = 0; k < count; ++k) {
    const DenseShape& shape = shapes[k];
    if (!along_channel(loads[k], shape) && shape.rank > space->rank) space->rank = shape.rank;
  }
  for (i64 d = 0; d < space->rank; ++d) space->dims[d] = 1;
  for (i64 k = 0; k < count; ++k) {
    const DenseShape& shape = shapes[k];
    const bool channel = along_channel(loads[k], shape);
    if (channel && space->rank == 0) return false;
    for (i64 d = 0; d < shape.rank; ++d) {
      i64& extent = space->dims[channel ? (space->rank > 1 ? 1 : 0) : space->rank - shape.rank + d];
      if (shape.dims[d] == 1 || extent == shape.dims[d]) continue;
      if (extent != 1) return false;
      extent = shape.dims[d];
    }
  }
  return true;
}

// Strides of one operand along every axis of the space; 0 where it is broadcast.
inline void dense_strides(const DenseLoad& load, const DenseShape& shape, i64 rank, i64* strides) {
  for (i64 d = 0; d < rank; ++d) strides[d] = 0;
  if (!load.read) return;  // must not keep axes apart
  if (along_channel(load, shape)) {
    strides[rank > 1 ? 1 : 0] = shape.dims[0] == 1 ? 0 : 1;
    return;
  }
  i64 step = 1;
  for (i64 d = shape.rank - 1; d >= 0; --d) {
    strides[rank - shape.rank + d] = shape.dims[d] == 1 ? 0 : step;
    step *= shape.dims[d];
  }
}

// The layout of these loads and `results` dense results: axes of extent 1 dropped, neighbours merged that every operand
// walks as one. False where the loads do not broadcast.
inline bool dense_layout(const DenseLoad* loads, i64 count, const DenseShape* shapes, i64 results, DenseLayout* out) {
  DenseShape& space = out->shape;
  if (!dense_space(loads, count, shapes, &space)) return false;
  const i64 operands = count + results;
  i64 wide[dense_operands][dense_rank], kept[dense_operands][dense_rank];
  const DenseLoad plain = {0, false, true};
  out->size = 1;
  for (i64 d = 0; d < space.rank; ++d) out->size *= space.dims[d];
  for (i64 k = 0; k < operands; ++k) {
    if (k < count) dense_strides(loads[k], shapes[k], space.rank, wide[k]);
    else dense_strides(plain, space, space.rank, wide[k]);
  }
  i64 rank = 0;
  for (i64 axis = 0; axis < space.rank; ++axis) {
    const i64 extent = space.dims[axis];
    if (extent == 1) continue;
    bool merges = rank > 0;
    for (i64 k = 0; merges && k < operands; ++k) merges = kept[k][rank - 1] == wide[k][axis] * extent;
    if (merges) out->dims[rank - 1] *= extent;
    else out->dims[rank++] = extent;
    for (i64 k = 0; k < operands; ++k) kept[k][rank - 1] = wide[k][axis];
  }
  if (rank == 0) {  // one element
    rank = 1;
    out->dims[0] = 1;
    for (i64 k = 0; k < operands; ++k) kept[k][0] = 0;
  }
  out->rank = rank;
  for (i64 k = 0; k < operands; ++k) {
    bool still = true;
    for (i64 d = 0; d < rank; ++d) {
      out->strides[k * rank + d] = kept[k][d];
      still = still && kept[k][d] == 0;
    }
    out->kinds[k] = still ? 'u' : kept[k][rank - 1] == 0 ? 'r' : kept[k][rank - 1] == 1 ? 'c' : 's';
  }
  return true;
}

// Whether a kernel for an operand of kind `slot` serves one that is `kind`: a row's value may be the whole call's, and a
// stride known at run time anything.
OG_FN bool serves(char slot, char kind) { return slot == kind || slot == 's' || (slot == 'r' && kind == 'u'); }

}  // namespace og
