#pragma once
#include "cpu/pointwise.h"

// The positions of dense operands in the space that they broadcast to: opgraph/loops/layout.py in C++, for a library
// that runs without Python. Operands are row-major: the stride along the innermost axis is 0 or 1.

namespace og {

enum { dense_rank = 32, dense_operands = 64 };

// The alignment of an operand's dimensions with the space: from the right, as in NumPy, or one dimension along axis 1.
// Where only the shape of an operand counts (not `read`), its position does not.
struct DenseLoad {
  u8 input;
  bool channel, read;
};

struct DenseShape {
  i64 rank;
  i64 dims[dense_rank];
};

// The contents of a result: every element of the space, or one for each row, with the row's axes (size 1) or without.
enum : u8 { each_element, each_row_kept, each_row_dropped };

struct DenseLayout {
  DenseShape shape;  // of the space before collapsing
  i64 rank, outer, size;  // of axes; of axes before a row's, all if rows are not reduced; of elements
  i64 dims[dense_rank];
  i64 strides[dense_operands * dense_rank];  // as in og::Space: those of operand k from k * rank on
  char kinds[dense_operands];                // u, r, b, c or s of each operand, as in opgraph/loops/layout.py
};

OG_FN bool along_channel(const DenseLoad& load, const DenseShape& shape) { return load.channel && shape.rank == 1; }

// The space of these operands. Returns false if they do not broadcast.
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
  if (!load.read) return;  // must not prevent the merging of axes
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

// The shape of a result. The last `row_rank` axes of the space are those of a row.
inline void result_shape(const DenseShape& space, i64 row_rank, u8 result, DenseShape* shape) {
  shape->rank = 0;
  for (i64 d = 0; d < space.rank; ++d) {
    const bool of_row = result != each_element && d >= space.rank - row_rank;
    if (!of_row || result == each_row_kept) shape->dims[shape->rank++] = of_row ? 1 : space.dims[d];
  }
}

inline void result_strides(const DenseShape& space, i64 row_rank, u8 result, i64* strides) {
  i64 step = 1;
  for (i64 d = space.rank - 1; d >= 0; --d) {
    const bool still = space.dims[d] == 1 || (result != each_element && d >= space.rank - row_rank);
    strides[d] = still ? 0 : step;
    if (!still) step *= space.dims[d];
  }
}

inline char kind_of(const i64* strides, i64 rank, i64 outer) {
  bool still = true, in_row = false;
  for (i64 d = 0; d < rank; ++d) {
    still = still && strides[d] == 0;
    in_row = in_row || (d >= outer && strides[d] != 0);
  }
  const i64 last = strides[rank - 1];
  return still ? 'u' : last == 1 ? 'c' : last != 0 ? 's' : outer < rank && in_row ? 'b' : 'r';
}

// The layout of these loads and dense results. Axes of extent 1 are dropped, and neighbours that every operand walks as
// one are merged; those of a row (the last `row_rank`, none if rows are not reduced) only with each other. Returns
// false if the loads do not broadcast, or have fewer axes than a row.
inline bool dense_layout(const DenseLoad* loads, i64 count, const DenseShape* shapes, const u8* results, i64 result_count,
                         i64 row_rank, DenseLayout* out) {
  DenseShape& space = out->shape;
  if (!dense_space(loads, count, shapes, &space) || space.rank < row_rank) return false;
  const i64 operands = count + result_count, first_of_row = space.rank - row_rank;
  i64 wide[dense_operands][dense_rank], kept[dense_operands][dense_rank];
  out->size = 1;
  for (i64 d = 0; d < space.rank; ++d) out->size *= space.dims[d];
  for (i64 k = 0; k < operands; ++k) {
    if (k < count) dense_strides(loads[k], shapes[k], space.rank, wide[k]);
    else result_strides(space, row_rank, results[k - count], wide[k]);
  }
  i64 rank = 0, outer = 0;
  for (i64 axis = 0; axis < space.rank; ++axis) {
    if (axis <= first_of_row) outer = rank;
    const i64 extent = space.dims[axis];
    if (extent == 1) continue;
    bool merges = rank > (axis < first_of_row ? 0 : outer);
    for (i64 k = 0; merges && k < operands; ++k) merges = kept[k][rank - 1] == wide[k][axis] * extent;
    if (merges) out->dims[rank - 1] *= extent;
    else out->dims[rank++] = extent;
    for (i64 k = 0; k < operands; ++k) kept[k][rank - 1] = wide[k][axis];
  }
  if (row_rank == 0) outer = rank;
  if (rank == outer && (row_rank > 0 || rank == 0)) {  // a row of one element, or one element
    out->dims[rank++] = 1;
    for (i64 k = 0; k < operands; ++k) kept[k][rank - 1] = 0;
    if (row_rank == 0) outer = rank;
  }
  out->rank = rank;
  out->outer = outer;
  for (i64 k = 0; k < operands; ++k) {
    for (i64 d = 0; d < rank; ++d) out->strides[k * rank + d] = kept[k][d];
    out->kinds[k] = kind_of(kept[k], rank, outer);
  }
  return true;
}

// Cuts rows into boxes: whole rows, neighbours, of about `most` elements. Writes them behind the strides of a layout,
// in the format of kernels/cpu/inner_reduction.h, and returns their number.
inline i64 cut_rows(const DenseLayout& layout, i64 most, i64* to) {
  i64 *box = to + 3, *counts = box + layout.rank, elements = 1, boxes = 1;
  for (i64 d = layout.rank - 1; d >= 0; --d) {
    const i64 fits = most > elements ? most / elements : 1;
    box[d] = d >= layout.outer || layout.dims[d] < fits ? layout.dims[d] : fits;
    counts[d] = (layout.dims[d] + box[d] - 1) / box[d];
    elements *= box[d];
    boxes *= counts[d];
  }
  to[0] = boxes;
  to[1] = 0;  // nothing is left for a second stage
  to[2] = layout.rank - layout.outer;
  return boxes;
}

// True if a kernel for an operand of kind `slot` serves one of kind `kind`: a row's value may be the whole call's, and
// a stride known at run time may be any.
OG_FN bool serves(char slot, char kind) { return slot == kind || slot == 's' || (slot == 'r' && kind == 'u'); }

}  // namespace og
