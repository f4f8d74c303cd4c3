#pragma once
#include "cpu/inner_reduction.h"

// The CPU skeleton of a loop over few long rows: these are cut, a box is a piece of one row, and passes are stages.

namespace og {

// ---- rows in pieces --------------------------------------------------------------------------------------------------

// Few long rows are cut: a box is a piece of one row, and passes are stages. Between stages, the partial results of the
// pieces are joined, in the order of the pieces. Each stage recomputes a row's values from earlier stages' results.
struct Pieces {
  const Boxes* boxes;
  i64 row_rank, rows, each, length;  // each: pieces of a row
  double* totals;                    // of each row: the results of all passes, one after the other
  Partial* partials;                 // of each piece: the results of the current pass
};

// The number of reductions of all passes before this one.
template <class F, int pass> constexpr int reductions_before() {
  if constexpr (pass == 0) {
    return 0;
  } else {
    return reductions_before<F, pass - 1>() + F::reductions(pass - 1);
  }
}

// Computes the values of a row that follow from the passes before this one.
template <class F, int pass, int from = 0> OG_FN void restore(F& f, const Pieces& pieces, i64 row) {
  if constexpr (from < pass) {
    const double* totals = pieces.totals + row * reductions_before<F, F::passes>() + reductions_before<F, from>();
    f.template reduced<from>(Totals{totals}, (double)pieces.length);
    restore<F, pass, from + 1>(f, pieces, row);
  }
}

// A functor at the start of a row.
template <class F> OG_FN F at_row(const Pieces& pieces, i64 row, i64* offset) {
  const Space& space = pieces.boxes->space;
  const i64 rank = space.rank;
  i64 step[F::operands];
  for (int k = 0; k < F::operands; ++k) {
    offset[k] = 0;
    step[k] = space.strides[k * rank + rank - 1];
  }
  for (i64 d = rank - pieces.row_rank - 1, rest = row; d >= 0; --d) {
    for (int k = 0; k < F::operands; ++k) offset[k] += rest % space.dims[d] * space.strides[k * rank + d];
    rest /= space.dims[d];
  }
  F f;
  f.steps(step);
  f.move(space.base, offset);
  f.call();
  f.row();
  return f;
}

template <class F, int pass> void piece_of_row(const Pieces& pieces, i64 number) {
  const Boxes& boxes = *pieces.boxes;
  const Space& space = boxes.space;
  const i64 rank = space.rank;
  Place<F> place;
  F f = at_row<F>(pieces, number / pieces.each, place.offset);
  restore<F, pass>(f, pieces, number / pieces.each);
  place.start(boxes, number);
  if (pass + 1 == F::passes) {
    double* const left = boxes.work + number * boxes.leaves;
    for (int k = 0; k < F::sums; ++k) place.start_cells(boxes.sum(k), k, left + boxes.sum(k).left);
  }
  Reductions<F, pass> reductions;
  reductions.start();
  do {
    f.move(space.base, place.offset);
    f.run();
    one_run<F, pass, false>(f, place.extent[rank - 1], reductions, place.cell, place.rests);
  } while (place.next(boxes, rank - pieces.row_rank, rank - 1));
  reductions.partials(pieces.partials + number * F::most);
}

// The end of a stage: its results, and after the last stage those of the rows.
template <class F, int pass> void end_stage(const Pieces& pieces) {
  constexpr int all = reductions_before<F, F::passes>();
  for (i64 row = 0; row < pieces.rows; ++row) {
    Partial joined[F::most + 1];
    const Partial* piece = pieces.partials + row * pieces.each * F::most;
    for (int k = 0; k < F::reductions(pass); ++k) joined[k] = piece[k];
    for (i64 i = 1; i < pieces.each; ++i) Reductions<F, pass>::join(joined, piece + i * F::most);
    Reductions<F, pass>::results(joined, pieces.totals + row * all + reductions_before<F, pass>());
    if constexpr (pass + 1 == F::passes) {
      i64 offset[F::operands];
      F f = at_row<F>(pieces, row, offset);
      restore<F, F::passes>(f, pieces, row);
      f.finish();
    }
  }
}

// Pieces [begin, end) of all stages, which follow each other; if end < begin, only the end of stage -1 - begin.
template <class F, int pass = 0>
void stages(const Pieces& pieces, i64 begin, i64 end, i64 threads, Parallel parallel) {
  if constexpr (pass < F::passes) {
    const i64 count = pieces.boxes->count, first = pass * count;
    const bool whole = begin <= first && end >= first + count;
    if (begin < first + count && end > first && begin >= 0) {
      const auto work = [&](i64 number) { piece_of_row<F, pass>(pieces, number); };
      in_threads(work, begin > first ? begin - first : 0, end < first + count ? end - first : count, threads, parallel);
    }
    if (begin == -1 - pass || (whole && begin == 0 && end == F::passes * count)) end_stage<F, pass>(pieces);
    stages<F, pass + 1>(pieces, begin, end, threads, parallel);
  }
}

// begin and end count the pieces of all stages. If these are all pieces, the second stage of sums follows.
// begin = -1 - stage: only the end of that stage.
template <class F>
OG_FN void launch_split(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  double small[small_work];
  const Boxes boxes = boxes_at<F>(base, layout, 0, small);
  const i64 row_rank = boxes.box[-1], outer = boxes.space.rank - row_rank;
  Pieces pieces = {&boxes, row_rank, 1, 1, 1, boxes.work + boxes.count * boxes.leaves, nullptr};
  for (i64 d = 0; d < outer; ++d) pieces.rows *= boxes.space.dims[d];
  for (i64 d = outer; d < boxes.space.rank; ++d) {
    pieces.each *= boxes.counts[d];
    pieces.length *= boxes.space.dims[d];
  }
  pieces.partials = (Partial*)(pieces.totals + pieces.rows * reductions_before<F, F::passes>());
  stages<F>(pieces, begin, end, threads, parallel);
  if (begin == -F::passes || (begin == 0 && end == F::passes * boxes.count)) {
    for (int k = 0; k < F::sums; ++k) totals<F>(boxes, k);
  }
}

}  // namespace og
