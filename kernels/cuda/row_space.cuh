#pragma once
#include "cuda/block_reduce.cuh"

// The positions of rows, and the division of their elements.

namespace og {

// ---- dividing a row --------------------------------------------------------------------------------------------

// x / d for many x, as two products instead of a quotient: at most 1.5 ulp off. The first factor is the power of 2 in
// 1 / d, so that no product overflows, or loses bits, unless the quotient does. For 0, infinities and NaN the result is
// the same as that of a division.
struct Inverse {
  float scale, part;  // a power of 2; the rest of 1 / d: 1/2 to 1 unless d is extreme
};
OG_FN Inverse inverse_of(float d) {
  const i32 own = 127 - (i32)(bits(d) >> 23 & 0xff), exponent = own < -126 ? -126 : own;
  const float scale = from_bits((u32)(exponent + 127) << 23);
  return {scale, divide(1.0f, d * scale)};
}
OG_FN float times(float x, Inverse inverse) { return x * inverse.scale * inverse.part; }

// ---- the space -------------------------------------------------------------------------------------------------

// Extents, the cut, and strides (in elements), passed by value; 64-bit words. Axes: those of rows, then those of a row.
// Packs are counted per row, per run of it, and per piece, if several blocks share a row. part[k]: the position in
// `work` where sum k leaves the sums of groups; -1: there is one group, which completes it.
template <int rank, int operands, int sums> struct RowSpace {
  i64 rows, chunk, length, packs, run_packs, pieces, piece_packs;
  i64 part[sums > 0 ? sums : 1];
  i64 extent[rank];
  i64 strides[operands][rank];
};

// Moves offsets to place `at` of the axes [from, to).
template <class I, int from, int to, int rank, int operands, int sums>
OG_FN void move_along(const RowSpace<rank, operands, sums>& space, I at, i64 (&offset)[operands]) {
  OG_UNROLL for (int d = to - 1; d >= from; --d) {
    const I extent = (I)space.extent[d], outer = d == from ? 0 : at / extent, here = at - outer * extent;
    OG_UNROLL for (int k = 0; k < operands; ++k) offset[k] += (i64)here * space.strides[k][d];
    at = outer;
  }
}

}  // namespace og
