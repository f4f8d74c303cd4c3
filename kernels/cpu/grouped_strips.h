#pragma once
#include "cpu/split_outer_reduction.h"
#include "cpu/split_reduction.h"

// Groups of lanes: joins the results of a group's lanes, and walks neighbouring strips of lanes together.

namespace og {

struct Groups {
  const Boxes* boxes;
  i64 row_rank, group, width;  // lanes of a row, and of a strip
  i64 rows, each, length;      // places along the outer axes, pieces of each, elements of a row
  double *totals, *partials;   // for all lanes: results of all passes, for each place; of this pass, for each piece
  OG_FN i64 lanes() const { return boxes->space.inner; }
};

// Calls work(how, number) for each reduction of a pass. `number` counts the reductions of all passes.
template <class F, class Work> OG_FN void each_reduction(int pass, const Work& work) {
  each<F::passes>([&](auto p) {
    if (p.value != pass) return;
    each<F::reductions(p.value)>([&](auto k) {
      work(Number<(int)F::how(p.value, k.value)>{}, reductions_before<F, p.value>() + k.value);
    });
  });
}

// Sets each lane to the result of its group.
template <How how> OG_ONCE void join_group(double* total, i64 group, i64 lanes) {
  for (i64 first = 0; first < lanes; first += group) {
    double whole = total[first];
    for (i64 i = 1; i < group; ++i) whole = joined<how>(whole, total[first + i]);
    for (i64 i = 0; i < group; ++i) total[first + i] = whole;
  }
}
template <class F> OG_ONCE void join_groups(const Groups& all, int pass, double* totals) {
  each_reduction<F>(pass, [&](auto how, int k) { join_group<(How)how.value>(totals + k * all.lanes(), all.group, all.lanes()); });
}

// Neighbouring strips of rows at a place, from lane `begin` on.
template <class F> struct Strips {
  const Groups& all;
  const Place<F>& place;
  i64 begin, count;
  F f[most_sides];

  OG_FN i64 lane(i64 s) const { return begin + s * all.width; }
  OG_FN i64 lanes(i64 s) const {
    const i64 left = all.lanes() - lane(s);
    return left < all.width ? left : all.width;
  }
  // Moves to the next strips. Returns false after the last ones.
  OG_FN bool next() {
    begin += count * all.width;
    const i64 left = (all.lanes() - begin + all.width - 1) / all.width;
    count = left < most_sides ? left : (i64)most_sides;
    return count > 0;
  }
  // Moves the functor of strip s to element r of the innermost axis of the row.
  OG_FN void move(i64 s, i64 r) {
    const Space& space = all.boxes->space;
    i64 offset[F::operands];
    for (int k = 0; k < F::operands; ++k) {
      const i64 at = F::per_group(k) ? lane(s) / all.group : lane(s);
      offset[k] = place.offset[k] + at * place.step[k] + r * space.strides[k * space.rank + space.rank - 2];
    }
    f[s].move(space.base, offset);
  }
  // Starts the functors, with the results of the passes before this one.
  template <int pass> OG_FN void start(const double* totals) {
    for (i64 s = 0; s < count; ++s) {
      f[s].group = all.group;
      f[s].steps(place.step);
      move(s, 0);
      f[s].call();
      f[s].row(lanes(s));
      each<pass>([&](auto before) {
        constexpr int p = before.value;
        alignas(64) double total[F::most + 1][side];
        for (int k = 0; k < F::reductions(p); ++k)
          __builtin_memcpy(total[k], totals + (reductions_before<F, p>() + k) * all.lanes() + lane(s), lanes(s) * sizeof(double));
        f[s].template reduced<p>(total, (double)all.length, lanes(s));
      });
    }
  }
};

}  // namespace og
