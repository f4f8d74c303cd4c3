#pragma once
#include "cuda/split_reduction.cuh"

// The CUDA skeleton of a loop over rows. A row is the last `row_rank` axes: several runs, the last axis each. A group
// of T threads takes a row: up to a warp of them, several groups to a block; more than a warp, one to a block. The row
// is walked once for each reduction that waits for another. Where it is `held`, its operands are read once, P packs of
// V neighbours by each thread, and wait in registers, as do values that passes keep for each other; longer rows are
// read again, and where they are few, several blocks take pieces of each.
//
// No atomics. A thread joins its own packs, the threads of a warp reduce by a butterfly of shuffles, which gives all of
// them the same bits, and warps in shared memory: one order whatever the grid. Where something is added up over rows
// too (the gradient of a norm's scale), a group takes `chunk` rows one after the other, keeps what it adds up in
// registers, and leaves it to reduction_finalize.cuh.

namespace og {

// A group at the start, and which of its block's it is. adjacent > 1: neighbouring threads take neighbouring rows, so
// many of them, since memory runs along these, and the T threads of a row reduce in shared memory alone.
template <class Group, class Space> OG_FN i64 set_up(Group& g, void* const* base, const Space& space) {
  constexpr int T = Group::threads, adjacent = Group::abreast;
  if constexpr (decltype(g.block_reduce)::shared) {
    __shared__ double place[2][Group::most][decltype(g.block_reduce)::slots];
    g.block_reduce.place = place;
    g.block_reduce.buffer = 0;
  }
  g.base = base;
  g.space = &space;
  g.start();
  const int thread = (int)threadIdx.x;
  g.lane = adjacent > 1 ? thread / adjacent : thread % T;
  return adjacent > 1 ? thread % adjacent : thread / T;
}

// held: a row fits into P packs of each of its T threads; whole: it fills them; small: bits of the operands that do not
// wait in registers.
template <class F, int V, int P, int T, bool held, bool whole, u64 small, class I, int row_rank, int adjacent, int lead,
          u64 loose, int rank, int operands, int sums>
OG_FN void reduce_rows(void* const* base, const RowSpace<rank, operands, sums>& space, typename F::Addend* work) {
  using Group = RowGroup<F, V, P, T, held, whole, small, I, row_rank, adjacent, lead, loose, rank, operands, sums>;
  Group g;
  const i64 own = set_up(g, base, space);
  const i64 group = (i64)blockIdx.x * Group::groups + own;
  if constexpr (F::sums == 0) {
    g.row(group);
  } else {
    OG_UNROLL for (int k = 0; k < F::sums; ++k)
      OG_UNROLL for (int p = 0; p < P; ++p)
        OG_UNROLL for (int v = 0; v < V; ++v) g.added[k][p][v] = 0;
    OG_ROLLED for (i64 number = 0; number < space.chunk; ++number) g.row(group * space.chunk + number);
    g.inside = group * space.chunk < space.rows;
    g.leave((I)group, work);
  }
}

// One stage of few long rows, each of which `pieces` blocks share: what passes make of the pieces is left in `work`,
// and every block of the next stage joins it in the same order.
template <class F, int V, int P, int T, u64 small, class I, int row_rank, int adjacent, int lead, u64 loose, int stage,
          int rank, int operands>
OG_FN void reduce_pieces(void* const* base, const RowSpace<rank, operands, 0>& space, double* work) {
  using Group = RowPieces<RowGroup<F, V, P, T, false, false, small, I, row_rank, adjacent, lead, loose, rank, operands, 0>>;
  Group g;
  const i64 own = set_up(g, base, space);
  const i64 pieces = stage == F::passes ? 1 : space.pieces, block = (i64)blockIdx.x / pieces;
  g.template piece<stage>(block * Group::groups + own, (i64)blockIdx.x - block * pieces, work);
}

}  // namespace og
