#pragma once
#include "host_sums.h"

// The CPU skeleton of a loop over rows. A row is the last `row_rank` axes: several runs, the last axis each. It is walked
// once for each reduction that waits for another; what the last pass needs is then known, and results are written. Boxes
// (kernels/host_sums.h) hold whole rows; any thread may do any box, so the bits never depend on the number of threads.
//
// Sums of floats are added up in doubles, those of doubles carry what each addition rounded off; the largest and the
// smallest element are exact, and NaN if one is.

namespace og {

enum { keep_bytes = 256 * 1024, block = 64 };  // block: elements that are reduced at a time, two in each lane
enum class How { add, multiply, largest, smallest };

// ---- one reduction of one row ----------------------------------------------------------------------------------------

// Pairs of floats are added up in double lanes; doubles carry what was rounded off.
template <How how, class T> struct Reduction;

// join(l, l + half) for the lower half of the lanes, then for the lower half of these: in loops of known lengths.
template <int half = lanes / 2, class Join> OG_FN void fold(const Join& join) {
  for (int l = 0; l < half; ++l) join(l, l + half);
  if constexpr (half > 1) fold<half / 2>(join);
}

// What a piece of a row makes; of a sum of doubles, with what additions rounded off.
struct Partial {
  double value, rest;
};

template <class T> struct Reduction<How::add, T> {
  static constexpr bool exact = sizeof(T) == sizeof(double);
  double lane[lanes];
  double rests[exact ? lanes : 1];
  static OG_FN T nothing() { return 0; }
  OG_FN void start() {
    for (int l = 0; l < lanes; ++l) lane[l] = 0;
    if constexpr (exact)
      for (int l = 0; l < lanes; ++l) rests[l] = 0;
    else
      rests[0] = 0;
  }
  OG_FN void add(const T* x) {
    if constexpr (exact) {
      for (int i = 0; i < block; i += lanes)
        for (int l = 0; l < lanes; ++l) add_exactly(lane[l], rests[l], x[i + l]);
    } else {
      for (int l = 0; l < lanes; ++l) lane[l] += (double)(x[l] + x[l + lanes]);
    }
  }
  OG_FN Partial partial() {
    fold([&](int l, int other) {
      if constexpr (exact) {
        add_exactly(lane[l], rests[l], lane[other]);
        rests[l] += rests[other];
      } else {
        lane[l] += lane[other];
      }
    });
    return {lane[0], rests[0]};
  }
  static OG_FN void join(Partial& into, Partial x) {
    if constexpr (exact) {
      add_exactly(into.value, into.rest, x.value);
      into.rest += x.rest;
    } else {
      into.value += x.value;
    }
  }
  static OG_FN double result(Partial x) { return exact ? whole(x.value, x.rest) : x.value; }
};

template <class T> struct Reduction<How::multiply, T> {
  double lane[lanes];
  static OG_FN T nothing() { return 1; }
  OG_FN void start() {
    for (int l = 0; l < lanes; ++l) lane[l] = 1;
  }
  OG_FN void add(const T* x) {
    for (int l = 0; l < lanes; ++l) lane[l] *= (double)x[l] * (double)x[l + lanes];
  }
  OG_FN Partial partial() {
    fold([&](int l, int other) { lane[l] *= lane[other]; });
    return {lane[0], 0};
  }
  static OG_FN void join(Partial& into, Partial x) { into.value *= x.value; }
  static OG_FN double result(Partial x) { return x.value; }
};

// What is not smaller: NaN is taken, and nothing is taken instead of it.
template <class T, int sign> struct Extreme {
  T lane[lanes];
  static OG_FN T nothing() { return sign * -infinity<T>(); }
  template <class U> static OG_FN U chosen(U a, U b) {
    const bool beyond = sign > 0 ? b > a : b < a;
    return beyond | (b != b) ? b : a;
  }
  OG_FN void start() {
    for (int l = 0; l < lanes; ++l) lane[l] = nothing();
  }
  OG_FN void add(const T* x) {
    for (int i = 0; i < block; i += lanes)
      for (int l = 0; l < lanes; ++l) lane[l] = chosen(lane[l], x[i + l]);
  }
  OG_FN Partial partial() {
    fold([&](int l, int other) { lane[l] = chosen(lane[l], lane[other]); });
    return {(double)lane[0], 0};
  }
  static OG_FN void join(Partial& into, Partial x) { into.value = chosen(into.value, x.value); }
  static OG_FN double result(Partial x) { return x.value; }
};
template <class T> struct Reduction<How::largest, T> : Extreme<T, 1> {};
template <class T> struct Reduction<How::smallest, T> : Extreme<T, -1> {};

// ---- dividing a row --------------------------------------------------------------------------------------------------

// x / d for many x: two products instead of a quotient, 1.5 ulp off at most (2 below normal numbers). The first takes the exponent of 1 / d, so that
// neither overflows, or loses bits, unless the quotient does; 0, infinities and NaN come out as of a division.
struct Inverse {
  float scale, part;  // a power of 2; what is left, 1 to 2 where d is no extreme
};
OG_FN Inverse inverse_of(float d) {
  const double exact = 1.0 / (double)d;  // 2^-128 to 2^149, 0, infinity or NaN
  const i32 own = (i32)(bits(exact) >> 52 & 0x7ff) - 1023, exponent = own > 127 ? 127 : own < -126 ? -126 : own;
  const double scale = from_bits((u64)(exponent + 1023) << 52);
  return {(float)scale, (float)(exact / scale)};
}
OG_FN float times(float x, Inverse inverse) { return x * inverse.scale * inverse.part; }

// ---- one row ---------------------------------------------------------------------------------------------------------

// The reductions of a pass.
template <class F, int pass, int k = 0> struct Reductions {
  Reduction<F::how(pass, k), typename F::Addend> own;
  Reductions<F, pass, k + 1> others;
  OG_FN void start() {
    own.start();
    others.start();
  }
  // Addends of a block, those of the next reduction `apart` further on.
  OG_FN void add(const typename F::Addend* x, int apart) {
    own.add(x);
    others.add(x + apart, apart);
  }
  OG_FN void fill(typename F::Addend* x, i64 n, int apart) {
    for (i64 i = n; i < block; ++i) x[i] = own.nothing();
    others.fill(x + apart, n, apart);
  }
  OG_FN void partials(Partial* to) {
    *to = own.partial();
    others.partials(to + 1);
  }
  static OG_FN void join(Partial* into, const Partial* x) {
    decltype(own)::join(*into, *x);
    decltype(others)::join(into + 1, x + 1);
  }
  static OG_FN void results(const Partial* x, double* to) {
    *to = decltype(own)::result(*x);
    decltype(others)::results(x + 1, to + 1);
  }
};
template <class F, int pass> struct Reductions<F, pass, F::reductions(pass)> {
  OG_FN void start() {}
  OG_FN void add(const typename F::Addend*, int) {}
  OG_FN void fill(typename F::Addend*, i64, int) {}
  OG_FN void partials(Partial*) {}
  static OG_FN void join(Partial*, const Partial*) {}
  static OG_FN void results(const Partial*, double*) {}
};

struct Totals {
  const double* value;
  OG_FN double operator()(int k) const { return value[k]; }
};

// One run of a pass. `cell` and `rests` are those of the sums, in the last pass.
template <class F, int pass, bool keep>
OG_FN void one_run(const F f, i64 width, Reductions<F, pass>& reductions, double* const* cell, const i64* rests) {
  using Addend = typename F::Addend;
  constexpr bool writes = pass + 1 == F::passes && F::stores;
  constexpr int n_reductions = F::reductions(pass), n_sums = writes ? F::sums : 0;
  if constexpr (n_reductions + n_sums == 0) {
    OG_VECTORIZE
    for (i64 i = 0; i < width; ++i) f.template element<pass, keep, 0>(i, nullptr);
  } else if constexpr (n_sums == 0) {
    i64 first = 0;
    alignas(64) Addend x[n_reductions * block];
    for (; first + block <= width; first += block) {
      OG_VECTORIZE
      for (int i = 0; i < block; ++i) f.template element<pass, keep, block>(first + i, x + i);
      reductions.add(x, block);
    }
    if (first < width) {
      OG_VECTORIZE
      for (i64 i = 0; i < width - first; ++i) f.template element<pass, keep, block>(first + i, x + i);
      reductions.fill(x, width - first, block);
      reductions.add(x, block);
    }
  } else {
    alignas(64) Addend addend[n_reductions + n_sums][strip];
    Row<Addend> total[n_sums + 1];
    for (i64 first = 0; first < width; first += strip) {
      const i64 n = width - first < strip ? width - first : strip;
      const i64 filled = (n + block - 1) / block * block;
      OG_VECTORIZE
      for (i64 i = 0; i < n; ++i) f.template element<pass, keep, strip>(first + i, &addend[0][i]);
      if constexpr (n_reductions > 0) {
        if (filled > n) reductions.fill(addend[0] + filled - block, n - filled + block, strip);
        for (i64 i = 0; i < filled; i += block) reductions.add(addend[0] + i, strip);
      }
      each<n_sums>([&](auto k) {
        Addend* x = addend[n_reductions + k.value];
        if constexpr (F::adds_row(k.value)) {
          for (i64 i = n; i < filled; ++i) x[i] = 0;
          if (n <= few) {
            total[k.value].add_few(x, n);
          } else {
            total[k.value].add(x, filled);
          }
        } else {
          add_each(cell[k.value] + first, rests[k.value], x, n);
        }
      });
    }
    each<n_sums>([&](auto k) {
      if constexpr (F::adds_row(k.value)) total[k.value].into(cell[k.value], rests[k.value]);
    });
  }
}

struct RowWalk {
  void* const* base;
  const Boxes* boxes;
  i64 row_rank, length;  // axes of a row, its elements
};

// Moves to the next run of a row. Offsets and cells come back to the start of the row after the last one.
template <class F> OG_FN bool next_run(const RowWalk& walk, i64* at, i64* offset, double** cell) {
  const Space& space = walk.boxes->space;
  const i64 rank = space.rank;
  for (i64 d = rank - 2; d >= rank - walk.row_rank; --d) {
    const bool inside = ++at[d] < space.dims[d];
    const i64 moved = inside ? 1 : 1 - space.dims[d];
    for (int k = 0; k < F::operands; ++k) offset[k] += moved * space.strides[k * rank + d];
    for (int k = 0; k < F::sums; ++k) cell[k] += moved * walk.boxes->sum(k).strides[d];
    if (inside) return true;
    at[d] = 0;
  }
  return false;
}

template <class F, bool keep, int pass = 0>
OG_FN void passes(F& f, const RowWalk& walk, i64* at, i64* offset, double** cell, const i64* rests, char* memory) {
  if constexpr (pass < F::passes) {
    const i64 width = walk.boxes->space.inner;
    constexpr i64 room = F::kept_bytes ? keep_bytes / (F::kept_bytes ? F::kept_bytes : 1) / 8 * 8 : 0;
    Reductions<F, pass> reductions;
    reductions.start();
    i64 first = 0;
    do {
      f.move(walk.base, offset);
      f.run();
      if constexpr (keep) f.keep(memory, room, first);
      one_run<F, pass, keep>(f, width, reductions, cell, rests);
      first += width;
    } while (next_run<F>(walk, at, offset, cell));
    Partial partials[F::most + 1];
    double totals[F::most + 1];
    reductions.partials(partials);
    reductions.results(partials, totals);
    f.template reduced<pass>(Totals{totals}, (double)walk.length);
    passes<F, keep, pass + 1>(f, walk, at, offset, cell, rests, memory);
  }
}

// ---- boxes of whole rows ---------------------------------------------------------------------------------------------

template <class F, bool keep> void box_of_rows(const Boxes& boxes, i64 row_rank, i64 number) {
  constexpr int n = F::operands, m = F::sums;
  const Space& space = boxes.space;
  const i64 rank = space.rank, outer = rank - row_rank;
  i64 chunk[max_rank], extent[max_rank], at[max_rank], step[n], offset[n], rests[m + 1];
  double* cell[m + 1];
  i64 rows = 1, length = 1;
  for (int k = 0; k < n; ++k) {
    offset[k] = 0;
    step[k] = space.strides[k * rank + rank - 1];
  }
  for (i64 d = rank - 1, rest = number; d >= 0; --d) {
    chunk[d] = rest % boxes.counts[d];
    rest /= boxes.counts[d];
    extent[d] = boxes.extent(d, chunk[d]);
    at[d] = 0;
    (d < outer ? rows : length) *= extent[d];
    for (int k = 0; k < n; ++k) offset[k] += chunk[d] * boxes.box[d] * space.strides[k * rank + d];
  }
  double* const left = boxes.work + number * boxes.leaves;
  for (int k = 0; k < m; ++k) {
    const Sum sum = boxes.sum(k);
    cell[k] = left + sum.left;
    rests[k] = sum.cells;
    for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) cell[k][i] = 0;
  }
  alignas(64) char memory[keep ? keep_bytes : 1];
  const RowWalk walk = {space.base, &boxes, row_rank, length};
  F f;
  f.steps(step);
  f.move(space.base, offset);
  f.call();
  for (;;) {
    f.move(space.base, offset);
    f.row();
    passes<F, keep>(f, walk, at, offset, cell, rests, memory);
    f.finish();
    if (--rows == 0) return;
    for (i64 d = outer - 1; d >= 0; --d) {  // the next row, like an odometer
      const bool inside = ++at[d] < extent[d];
      const i64 moved = inside ? 1 : 1 - extent[d];
      for (int k = 0; k < n; ++k) offset[k] += moved * space.strides[k * rank + d];
      for (int k = 0; k < m; ++k) cell[k] += moved * boxes.sum(k).strides[d];
      if (inside) break;
      at[d] = 0;
    }
  }
}

struct RowTeam {
  const Boxes* boxes;
  i64 row_rank, next, end;
};

template <class F> void take_rows(void* data) {
  RowTeam* team = (RowTeam*)data;
  const Space& space = team->boxes->space;
  i64 length = 1;
  for (i64 d = space.rank - team->row_rank; d < space.rank; ++d) length *= space.dims[d];
  for (;;) {
    const i64 number = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
    if (number >= team->end) return;
    if constexpr (F::kept_bytes > 0) {
      if (length <= keep_bytes / F::kept_bytes / 8 * 8) {
        box_of_rows<F, true>(*team->boxes, team->row_rank, number);
        continue;
      }
    }
    box_of_rows<F, false>(*team->boxes, team->row_rank, number);
  }
}

// ---- rows in pieces --------------------------------------------------------------------------------------------------

// Few long rows are cut: a box is a piece of one row, and passes are stages. Between these the pieces' partial results are
// joined, in the order of the pieces. Each stage finds the values of a row again from the results of the stages before.
struct Pieces {
  const Boxes* boxes;
  i64 row_rank, rows, each, length;  // each: pieces of a row
  double* totals;                    // of each row: the results of all passes, one after the other
  Partial* partials;                 // of each piece: those of the pass at hand
};

// Reductions of all passes before this one.
template <class F, int pass> constexpr int reductions_before() {
  if constexpr (pass == 0) {
    return 0;
  } else {
    return reductions_before<F, pass - 1>() + F::reductions(pass - 1);
  }
}

// The values of a row that follow from the passes before this one.
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
  constexpr int n = F::operands, m = F::sums;
  const Boxes& boxes = *pieces.boxes;
  const Space& space = boxes.space;
  const i64 rank = space.rank, outer = rank - pieces.row_rank, row = number / pieces.each;
  i64 offset[n], extent[max_rank], at[max_rank], rests[m + 1];
  double* cell[m + 1];
  F f = at_row<F>(pieces, row, offset);
  restore<F, pass>(f, pieces, row);
  for (i64 d = rank - 1, rest = number; d >= outer; --d) {
    const i64 chunk = rest % boxes.counts[d];
    rest /= boxes.counts[d];
    extent[d] = boxes.extent(d, chunk);
    at[d] = 0;
    for (int k = 0; k < n; ++k) offset[k] += chunk * boxes.box[d] * space.strides[k * rank + d];
  }
  if (pass + 1 == F::passes) {
    for (int k = 0; k < m; ++k) {
      const Sum sum = boxes.sum(k);
      cell[k] = boxes.work + number * boxes.leaves + sum.left;
      rests[k] = sum.cells;
      for (i64 i = 0; i < sum.cells * planes<typename F::Addend>(); ++i) cell[k][i] = 0;
    }
  }
  Reductions<F, pass> reductions;
  reductions.start();
  for (;;) {
    f.move(space.base, offset);
    f.run();
    one_run<F, pass, false>(f, extent[rank - 1], reductions, cell, rests);
    i64 d = rank - 2;
    for (; d >= outer; --d) {
      const bool inside = ++at[d] < extent[d];
      const i64 moved = inside ? 1 : 1 - extent[d];
      for (int k = 0; k < n; ++k) offset[k] += moved * space.strides[k * rank + d];
      if (pass + 1 == F::passes)
        for (int k = 0; k < m; ++k) cell[k] += moved * boxes.sum(k).strides[d];
      if (inside) break;
      at[d] = 0;
    }
    if (d < outer) break;
  }
  reductions.partials(pieces.partials + number * F::most);
}

// What follows a stage: its results, and after the last one those of the rows.
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

struct PieceTeam {
  const Pieces* pieces;
  i64 next, end;
};

template <class F, int pass> void take_pieces(void* data) {
  PieceTeam* team = (PieceTeam*)data;
  for (;;) {
    const i64 number = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED);
    if (number >= team->end) return;
    piece_of_row<F, pass>(*team->pieces, number);
  }
}

// Pieces [begin, end) of all stages, which follow each other, or (end < begin) what follows stage -1 - begin.
template <class F, int pass = 0>
void stages(const Pieces& pieces, i64 begin, i64 end, i64 threads, Parallel parallel) {
  if constexpr (pass < F::passes) {
    const i64 count = pieces.boxes->count, first = pass * count;
    const bool whole = begin <= first && end >= first + count;
    if (begin < first + count && end > first && begin >= 0) {
      PieceTeam team = {&pieces, begin > first ? begin - first : 0, end < first + count ? end - first : count};
      if (threads > 1 && parallel != nullptr) {
        parallel(take_pieces<F, pass>, &team, (unsigned)threads, 0);
      } else {
        take_pieces<F, pass>(&team);
      }
    }
    if (begin == -1 - pass || (whole && begin == 0 && end == F::passes * count)) end_stage<F, pass>(pieces);
    stages<F, pass + 1>(pieces, begin, end, threads, parallel);
  }
}

// ---- the second stage of sums ----------------------------------------------------------------------------------------

// The totals of what boxes contributed to, in the order of the boxes, added up in the memory of the first of them.
template <class F> void row_totals(const Boxes& boxes, int k) {
  const Sum sum = boxes.sum(k);
  const i64 rank = boxes.space.rank;
  const i64* strides = boxes.space.strides + sum.operand * rank;
  i64 chunk[max_rank];
  for (i64 d = 0; d < rank; ++d) chunk[d] = 0;
  for (;;) {
    double* cells = nullptr;
    for (i64 d = 0; d >= 0;) {
      i64 number = 0;
      for (i64 axis = 0; axis < rank; ++axis) number = number * boxes.counts[axis] + chunk[axis];
      double* more = boxes.work + number * boxes.leaves + sum.left;
      if (cells == nullptr) {
        cells = more;
      } else {
        add_cells(cells, more, sum.cells, typename F::Addend(0));
      }
      for (d = rank - 1; d >= 0; --d) {
        if (strides[d] != 0) continue;
        if (++chunk[d] < boxes.counts[d]) break;
        chunk[d] = 0;
      }
    }
    deliver<F>(boxes, k, chunk, cells);
    i64 d = rank - 1;
    for (; d >= 0; --d) {
      if (strides[d] == 0) continue;
      if (++chunk[d] < boxes.counts[d]) break;
      chunk[d] = 0;
    }
    if (d < 0) return;
  }
}

// layout: that of og::launch; then number of boxes, doubles that each leaves for the second stage, axes of a row,
// extents of a box, boxes along each axis, and sums as og::Sum has them. base has one entry more than there are operands: memory for what the boxes leave, and for the results of pieces and rows; null where `small_work`
// doubles suffice. begin and end: the boxes to do, of pieces those of all stages; all of them mean the second stage too,
// and begin = -1 - stage means what follows a stage alone.
template <class F> OG_FN Boxes row_boxes(void* const* base, const i64* layout, double* small) {
  const i64 rank = layout[0];
  const Space space = {base, rank, layout[1], layout[1 + rank], layout + 2, layout + 2 + rank};
  const i64* more = layout + 2 + rank + F::operands * rank;
  const i64 *box = more + 3, *counts = box + rank, *sums = counts + rank;
  double* work = base[F::operands] ? (double*)base[F::operands] : small;
  return {space, more[0], more[1], 0, box, counts, sums, sums, work};
}

template <class F>
OG_FN void launch_boxes_of_rows(void (*take)(void*), void* const* base, const i64* layout, i64 begin, i64 end, i64 threads,
                                Parallel parallel) {
  double small[small_work];
  const Boxes boxes = row_boxes<F>(base, layout, small);
  if (begin >= 0) {
    RowTeam team = {&boxes, boxes.box[-1], begin, end};
    if (threads > 1 && parallel != nullptr && end - begin > 1) {
      parallel(take, &team, (unsigned)threads, 0);
    } else {
      take(&team);
    }
  }
  if (begin < 0 || (begin == 0 && end == boxes.count)) {
    for (int k = 0; k < F::sums; ++k) row_totals<F>(boxes, k);
  }
}

template <class F>
OG_FN void launch_rows(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  launch_boxes_of_rows<F>(take_rows<F>, base, layout, begin, end, threads, parallel);
}

// The same where boxes are pieces of rows.
template <class F>
OG_FN void launch_pieces(void* const* base, const i64* layout, i64 begin, i64 end, i64 threads, Parallel parallel) {
  double small[small_work];
  const Boxes boxes = row_boxes<F>(base, layout, small);
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
    for (int k = 0; k < F::sums; ++k) row_totals<F>(boxes, k);
  }
}

}  // namespace og
