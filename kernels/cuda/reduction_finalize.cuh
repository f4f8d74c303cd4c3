#pragma once
#include "cuda/pointwise.cuh"

// The second stage of CUDA sums: adds up the sums that the tiles of the first stage (tiled_sums.cuh) left in `work`.

namespace og {

// The sums of the tiles of one sum, as axes: for each, its extent, its stride in `work` and its stride in the result;
// axes that are added up have stride 0 there and come last. first: its first block; -1 (no terms): the first stage did
// it all.
template <int axes> struct Left {
  i64 first, part, cells, terms, columns;
  i64 extent[axes], from[axes], to[axes];
  i64 kept, column_to;
};

template <int axes, int sums> struct AllLeft { Left<axes> of[sums]; };

// One block adds up one cell, or one cell of 32 columns, in double. The code exists once: a block looks up its sum.
template <class F, int axes, int sums>
OG_FN void totals(void* const* y, const AllLeft<axes, sums>& all, const typename F::Addend* work) {
  __shared__ double meet[block_size];
  int which = -1;
  void* result = y[0];
  each<sums>([&](auto k) {
    const Left<axes>& one = all.of[k.value];
    const i64 strips = F::adds_row(k.value) ? 1 : (one.columns + 31) / 32;
    if (one.terms > 0 && (i64)blockIdx.x >= one.first && (i64)blockIdx.x < one.first + one.cells * strips) {
      which = k.value;
      result = y[k.value];
    }
  });
  if (which < 0) return;
  const Left<axes>& left = all.of[which];
  const int wide = F::adds_row(which) ? 1 : 32, lanes = block_size / wide;
  const int thread = (int)threadIdx.x, tx = thread % wide, lane = thread / wide;
  const i64 block = (i64)blockIdx.x - left.first;
  const i64 strips = (left.columns + wide - 1) / wide, column = block % strips * wide + tx;
  i64 cell = block / strips, from = left.part + column, to = column * left.column_to;
  OG_UNROLL for (int a = axes - 1; a >= 0; --a) {
    if (a < left.kept) {
      from += cell % left.extent[a] * left.from[a];
      to += cell % left.extent[a] * left.to[a];
      cell /= left.extent[a];
    }
  }
  double sum = 0;
  if (column < left.columns) {
    OG_ROLLED for (i64 term = lane; term < left.terms; term += lanes) {
      i64 rest = term, at = from;
      OG_UNROLL for (int a = axes - 1; a >= 0; --a) {
        if (a >= left.kept) {
          at += rest % left.extent[a] * left.from[a];
          rest /= left.extent[a];
        }
      }
      sum += (double)work[at];
    }
  }
  meet[thread] = sum;
  __syncthreads();
  OG_ROLLED for (int half = lanes / 2; half > 0; half /= 2) {
    if (lane < half) meet[thread] += meet[thread + half * wide];
    __syncthreads();
  }
  if (lane == 0 && column < left.columns) total_of<F>(which, result, to, meet[thread]);
}

}  // namespace og
