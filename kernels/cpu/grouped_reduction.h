#pragma once
#include "cpu/grouped_strips.h"

// The CPU skeleton of a loop over rows that are groups of lanes (opgraph/schedule/grouped_rows.py). Each lane is
// reduced separately, as in kernels/cpu/outer_reduction.h; then the results of the lanes of a group are joined in
// order. A strip of lanes holds whole groups. Several strips are walked together, so that memory is read in longer
// stretches. A box is a piece of some rows, with all their lanes. If boxes hold whole rows, a box does all passes;
// otherwise passes are stages, as in kernels/cpu/split_reduction.h.

namespace og {

enum { line = 16, unrolled_steps = 4 };  // elements of a row for which a lane's sums stay in registers

// Adds s[0], s[apart], ...: `count` neighbours in a row. Four floats are added to each other first, as in
// kernels/cpu/row_reductions.h.
template <int count, class F, int pass, int k>
OG_FN void add_unrolled(LaneReductions<F, pass, k, true>&, i64, const typename F::Addend*, int) {}
template <int count, class F, int pass, int k>
OG_FN void add_unrolled(LaneReductions<F, pass, k, false>& all, i64 i, const typename F::Addend* s, int apart) {
  constexpr How how = F::how(pass, k);
  if constexpr (count == 4 && how == How::add && sizeof(*s) == sizeof(float)) {
    all.own.add(i, (s[0] + s[2 * apart]) + (s[apart] + s[3 * apart]));
  } else {
    for (int r = 0; r < count; ++r) all.own.add(i, s[r * apart]);
  }
  add_unrolled<count>(all.others, i, s + 1, apart);
}

// Processes `count` neighbouring elements of each lane's row. They are `step` apart.
template <class F, int pass, int count>
OG_FN void several_elements_each(const F& f, i64 n, i64 step, LaneReductions<F, pass>& made, double* const* cell) {
  constexpr int n_reductions = F::reductions(pass), n_sums = pass + 1 == F::passes && F::stores ? F::sums : 0;
  constexpr int apart = n_reductions + n_sums + 1;
  OG_VECTORIZE
  for (i64 i = 0; i < n; ++i) {
    typename F::Addend s[count * apart];
    each<count>([&](auto r) OG_LAMBDA {
      f.template element<pass, false, 1>(i, i + r.value * step, s + r.value * apart);
      for (int k = 0; k < n_sums; ++k) cell[k][i] += (double)s[r.value * apart + n_reductions + k];
    });
    add_unrolled<count>(made, i, s, apart);
  }
}

// One pass over the part of the rows at a place that is in the box. Afterwards the place is the same as before.
template <class F, int pass> OG_ONCE void pass_of_groups(const Groups& all, Place<F>& place, const double* totals, double* made) {
  const Boxes& boxes = *all.boxes;
  const i64 rank = boxes.space.rank, last = rank - 1, along = rank - 2;
  i64 step = 0;  // stride along the row if all operands have the same one: then the loop is unrolled
  bool even = !F::runs, first = true;
  for (int k = 0; k < F::operands; ++k) {
    if (!F::moves(k)) continue;
    const i64 own = boxes.space.strides[k * rank + along];
    even &= place.step[k] == 1 && (first || own == step);
    step = own, first = false;
  }
  for (int k = 0; k < F::sums; ++k) even &= boxes.sum(k).strides[along] == 0;
  Strips<F> strips = {all, place, 0, 0, {}};
  while (strips.next()) {
    strips.template start<pass>(totals);
    LaneReductions<F, pass> across[most_sides];
    for (i64 s = 0; s < strips.count; ++s) across[s].start();
    do {
      for (i64 r = 0; r < place.extent[along];) {
        const bool is_unrolled = even && place.extent[along] - r >= unrolled_steps;
        for (i64 s = 0; s < strips.count; ++s) {
          const i64 n = strips.lanes(s);
          double* cell[F::sums + 1];
          for (int k = 0; k < F::sums; ++k)
            cell[k] = place.cell[k] + strips.lane(s) * boxes.sum(k).strides[last] + r * boxes.sum(k).strides[along];
          strips.move(s, r);
          strips.f[s].run();
          if (is_unrolled) {
            for (i64 t = unrolled_steps; t < 2 * unrolled_steps; ++t)
              for (i64 i = 0; i < n; i += line) strips.f[s].ahead(t * step + i);
          }
          if (!is_unrolled) {
            several_elements_each<F, pass, 1>(strips.f[s], n, 0, across[s], cell);
          } else if (n == side) {
            several_elements_each<F, pass, unrolled_steps>(strips.f[s], side, step, across[s], cell);
          } else {
            several_elements_each<F, pass, unrolled_steps>(strips.f[s], n, step, across[s], cell);
          }
        }
        r += is_unrolled ? (i64)unrolled_steps : 1;
      }
    } while (place.next(boxes, last - all.row_rank, along));
    for (i64 s = 0; s < strips.count; ++s) {
      alignas(64) double total[F::most + 1][side];
      across[s].results(total);
      for (int k = 0; k < F::reductions(pass); ++k)
        __builtin_memcpy(made + k * all.lanes() + strips.lane(s), total[k], strips.lanes(s) * sizeof(double));
    }
  }
}

// The pass with this number. Only the walk over elements is compiled for each pass; all else, once for all passes.
template <class F> OG_ONCE void one_pass(const Groups& all, int pass, Place<F>& place, const double* totals, double* made) {
  each<F::passes>([&](auto p) {
    if (p.value == pass) pass_of_groups<F, p.value>(all, place, totals, made);
  });
}

template <class F> OG_ONCE void finish_groups(const Groups& all, const Place<F>& place, const double* totals) {
  Strips<F> strips = {all, place, 0, 0, {}};
  while (strips.next()) {
    strips.template start<F::passes>(totals);
    for (i64 s = 0; s < strips.count; ++s) strips.f[s].finish(strips.lanes(s));
  }
}

// Starts at the first place of box `number`, with the cells of the sums if they get addends in this pass.
template <class F> OG_ONCE void start_place(Place<F>& place, const Boxes& boxes, i64 number, bool adds) {
  place.start(boxes, number);
  if (!adds) return;
  for (int k = 0; k < F::sums; ++k) place.start_cells(boxes.sum(k), k, boxes.work + number * boxes.leaves + boxes.sum(k).left);
}

// A box of whole rows.
template <class F> void box_of_groups(const Groups& all, i64 number) {
  const Boxes& boxes = *all.boxes;
  Place<F> place;
  start_place(place, boxes, number, true);
  double* const totals = all.partials + number * reductions_before<F, F::passes>() * all.lanes();
  do {
    double* made = totals;
    for (int pass = 0; pass < F::passes; made += F::reductions(pass++) * all.lanes()) {
      one_pass(all, pass, place, totals, made);
      join_groups<F>(all, pass, totals);
    }
    finish_groups<F>(all, place, totals);
  } while (place.next(boxes, 0, boxes.space.rank - 1 - all.row_rank));
}

// A piece of rows; below, the step after all pieces are done, which joins them in order.
template <class F> void piece_of_groups(const Groups& all, int pass, i64 number) {
  Place<F> place;
  start_place(place, *all.boxes, number, pass + 1 == F::passes);
  const double* totals = all.totals + number / all.each * reductions_before<F, F::passes>() * all.lanes();
  one_pass(all, pass, place, totals, all.partials + number * F::most * all.lanes());
}
template <How how> OG_ONCE void join_piece(double* total, const double* piece, i64 lanes) {
  for (i64 i = 0; i < lanes; ++i) total[i] = joined<how>(total[i], piece[i]);
}
template <class F> void end_of_pieces(const Groups& all, int pass) {
  const i64 lanes_ = all.lanes();
  for (i64 row = 0; row < all.rows; ++row) {
    double* const totals = all.totals + row * reductions_before<F, F::passes>() * lanes_;
    const double* piece = all.partials + row * all.each * F::most * lanes_;
    each_reduction<F>(pass, [&](auto how, int k) {
      double* total = totals + k * lanes_;
      __builtin_memcpy(total, piece, lanes_ * sizeof(double));
      for (i64 p = 1; p < all.each; ++p) join_piece<(How)how.value>(total, piece + p * F::most * lanes_, lanes_);
      piece += lanes_;
    });
    join_groups<F>(all, pass, totals);
    if (pass + 1 == F::passes) {
      Place<F> place;
      start_place(place, *all.boxes, row * all.each, false);
      finish_groups<F>(all, place, totals);
    }
  }
}

// Stages as in kernels/cpu/split_reduction.h.
template <class F> void stages_of_groups(const Groups& all, i64 begin, i64 end, i64 threads, Parallel parallel) {
  const i64 count = all.boxes->count;
  for (int pass = 0; pass < F::passes; ++pass) {
    const i64 first = pass * count;
    if (begin < first + count && end > first && begin >= 0) {
      const auto work = [&](i64 number) { piece_of_groups<F>(all, pass, number); };
      in_threads(work, begin > first ? begin - first : 0, end < first + count ? end - first : count, threads, parallel);
    }
    if (begin == -1 - pass || (begin == 0 && end == F::passes * count)) end_of_pieces<F>(all, pass);
  }
}

// The arguments are those of og::launch_split, or of og::each_box if boxes hold whole rows. After the sums, layout
// holds the number of lanes of a group and of a strip, and 1 if boxes are pieces.
template <class F>
OG_FN void launch_grouped(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  double small[small_work];
  const Boxes boxes = boxes_at<F>(base, layout, 0, small);
  const i64 row_rank = boxes.box[-1], outer = boxes.space.rank - 1 - row_rank;
  const i64* const more = boxes.sums + F::sums * (6 + boxes.space.rank);
  double* const work = boxes.work + boxes.count * boxes.leaves;
  Groups all = {&boxes, row_rank, more[0], more[1], 1, 1, more[0], work, work};
  if (!more[2]) {
    for (i64 d = outer; d < outer + row_rank; ++d) all.length *= boxes.space.dims[d];
    return each_box<F>(boxes, begin, end, threads, parallel, [&](i64 number) { box_of_groups<F>(all, number); });
  }
  for (i64 d = 0; d < outer; ++d) all.rows *= boxes.space.dims[d];
  for (i64 d = outer; d < outer + row_rank; ++d) {
    all.each *= boxes.counts[d];
    all.length *= boxes.space.dims[d];
  }
  all.partials = work + all.rows * reductions_before<F, F::passes>() * all.lanes();
  stages_of_groups<F>(all, begin, end, threads, parallel);
  if (begin == -F::passes || (begin == 0 && end == F::passes * boxes.count)) {
    for (int k = 0; k < F::sums; ++k) totals<F>(boxes, k);
  }
}

}  // namespace og
