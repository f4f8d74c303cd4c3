#pragma once
#include "cpu/outer_reduction.h"

// The CPU skeleton of a loop over few long rows that lie side by side, each reduced once (schedule/split_columns.py): a
// box is a piece of some neighbouring rows. Their results are joined in order, so the bits depend on sizes alone.

namespace og {

template <How how> OG_FN double joined(double a, double b) {
  if constexpr (how == How::add) return a + b;
  if constexpr (how == How::multiply) return a * b;
  return Extreme<double, how == How::smallest ? -1 : 1>::chosen(a, b);
}

// The rows of a box: at most `most_sides` times `side` of them, so that memory is walked in longer stretches.
enum { most_sides = 4 };
OG_FN i64 sides_of(i64 rows) { return (rows + side - 1) / side; }
OG_FN i64 rows_of_side(i64 rows, i64 number) { return rows - number * side < side ? rows - number * side : (i64)side; }

// Functors at the first element of a box.
template <class F> struct Sides {
  F f[most_sides];
  i64 offset[F::operands];
  OG_FN void move(const Boxes& boxes, const Place<F>& place, i64 number) {
    for (int k = 0; k < F::operands; ++k) offset[k] = place.offset[k] + number * side * place.step[k];
    f[number].move(boxes.space.base, offset);
  }
  OG_FN void start(const Boxes& boxes, const Place<F>& place) {
    const i64 rows = place.extent[boxes.space.rank - 1];
    for (i64 number = 0; number < sides_of(rows); ++number) {
      f[number].steps(place.step);
      move(boxes, place, number);
      f[number].call();
      f[number].row(rows_of_side(rows, number));
    }
  }
};

template <class F> void piece_outer(const Boxes& boxes, i64 row_rank, i64 number) {
  const i64 last = boxes.space.rank - 1;
  Place<F> place;
  place.start(boxes, number);
  const i64 rows = place.extent[last], sides = sides_of(rows);
  Sides<F> all;
  LaneReductions<F, 0> made[most_sides];
  all.start(boxes, place);
  for (i64 i = 0; i < sides; ++i) made[i].start();
  do {
    for (i64 i = 0; i < sides; ++i) {
      all.move(boxes, place, i);
      all.f[i].run();
      const i64 n = rows_of_side(rows, i);
      if (n == side) {
        one_element_each<F, 0, false>(all.f[i], side, made[i], nullptr, nullptr);
      } else {
        one_element_each<F, 0, false>(all.f[i], n, made[i], nullptr, nullptr);
      }
    }
  } while (place.next(boxes, last - row_rank, last));
  for (i64 i = 0; i < sides; ++i) made[i].results((double(*)[side])(boxes.work + number * boxes.leaves) + i * F::most);
}

template <class F> void join_pieces(const Boxes& boxes, i64 row_rank) {
  const i64 last = boxes.space.rank - 1, lane_boxes = boxes.counts[last];
  i64 pieces = 1, length = 1;
  for (i64 d = last - row_rank; d < last; ++d) {
    pieces *= boxes.counts[d];
    length *= boxes.space.dims[d];
  }
  for (i64 first = 0; first < boxes.count; first += pieces * lane_boxes) {
    for (i64 l = 0; l < lane_boxes; ++l) {
      Place<F> place;
      place.start(boxes, first + l);
      Sides<F> all;
      all.start(boxes, place);
      const i64 rows = place.extent[last];
      for (i64 j = 0; j < sides_of(rows); ++j) {
        const auto made = [&](i64 p) {
          return (double(*)[side])(boxes.work + (first + p * lane_boxes + l) * boxes.leaves) + j * F::most;
        };
        double(*total)[side] = made(0);
        for (i64 p = 1; p < pieces; ++p) {
          const double(*more)[side] = made(p);
          each<F::reductions(0)>([&](auto k) {
            for (int i = 0; i < side; ++i) total[k.value][i] = joined<F::how(0, k.value)>(total[k.value][i], more[k.value][i]);
          });
        }
        all.f[j].template reduced<0>(total, (double)length, rows_of_side(rows, j));
        all.f[j].finish(rows_of_side(rows, j));
      }
    }
  }
}

// The arguments are those of og::boxes_at. begin < 0: only the step that follows the boxes.
template <class F>
OG_FN void launch_split_outer(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  double small[small_work];
  const Boxes boxes = boxes_at<F>(base, layout, 0, small);
  const i64 row_rank = boxes.box[-1];
  if (begin >= 0) in_threads([&](i64 number) { piece_outer<F>(boxes, row_rank, number); }, begin, end, threads, parallel);
  if (begin < 0 || (begin == 0 && end == boxes.count)) join_pieces<F>(boxes, row_rank);
}

}  // namespace og
