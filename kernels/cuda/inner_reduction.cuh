#pragma once
#include "cuda/split_reduction.cuh"

// The CUDA skeleton of a loop over rows. A row is the last `row_rank` axes: several runs along the last axis. A group
// of T threads takes a row: if T is at most a warp, a block has several groups, else one. The row is walked once for
// each reduction that depends on another one. If it is `held`, its operands are read once, P packs of V neighbours by
// each thread, and stay in registers, like the values that passes keep for each other. Longer rows are read again in
// each pass; if there are few of them, several blocks share each one.
//
// No atomics. A thread joins its own packs, the threads of a warp reduce by a butterfly of shuffles, which gives all of
// them the same bits, and warps reduce in shared memory: the order is the same for any grid. If there are sums over
// rows too (the gradient of a norm's scale), a group takes `chunk` rows one after the other, keeps its sums in
// registers, and leaves them to reduction_finalize.cuh.

namespace og {

// Starts a group, and returns its number within the block. adjacent > 1: that many neighbouring threads take
// neighbouring rows, since memory runs along these, and the T threads of a row reduce in shared memory alone.
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

// held: a row fits into P packs of each of its T threads; whole: it fills them; small: bits of the operands that are
// not kept in registers.
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

// One stage of few long rows; `pieces` blocks share each of them. The results of the passes over the pieces are left in
// `work`, and every block of the next stage joins them in the same order.
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
