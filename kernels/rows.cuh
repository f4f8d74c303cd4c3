#pragma once
#include "sums.cuh"

// The CUDA skeleton of a loop over rows. A row is the last `row_rank` axes: several runs, the last axis each. A group
// of T threads takes a row: up to a warp of them, several groups to a block; more than a warp, one to a block. The row
// is walked once for each reduction that waits for another. Where it is `held`, its operands are read once, P packs of
// V neighbours by each thread, and wait in registers, as do values that passes keep for each other; longer rows are
// read again, and where they are few, several blocks take pieces of each.
//
// No atomics. A thread joins its own packs, the threads of a warp meet in a butterfly of shuffles, which gives all of
// them the same bits, and warps in shared memory: one order whatever the grid. Where something is added up over rows
// too (the gradient of a norm's scale), a group takes `chunk` rows one after the other, keeps what it adds up in
// registers, and leaves it to the second stage of sums.cuh.

namespace og {

enum { warp_size = 32, ahead = 2 };  // ahead: packs of cached operands that are loaded before they are needed
enum class How { add, multiply, largest, smallest };
// once: of a row that is held; cached: the same for many rows, in each pass; again: of a row that is not held.
enum class Reading { once, cached, again };

// ---- joining ---------------------------------------------------------------------------------------------------

// of(a, b) has the bits of of(b, a), NaN aside. Wide: what threads have when they meet; sums of a few floats each are
// added up in double, which costs two shuffles instead of one.
template <How how> struct Join;
template <> struct Join<How::add> {
  template <class T> using Wide = double;
  template <class T> static OG_FN T nothing() { return 0; }
  template <class T> static OG_FN T of(T a, T b) { return a + b; }
};
template <> struct Join<How::multiply> {
  template <class T> using Wide = T;
  template <class T> static OG_FN T nothing() { return 1; }
  template <class T> static OG_FN T of(T a, T b) { return a * b; }
};

// NaN if one is; +0 is larger than -0.
template <int sign> struct Extreme {
  template <class T> using Wide = T;
  template <class T> static OG_FN T nothing() { return sign * -infinity<T>(); }
  template <class T> static OG_FN T of(T a, T b) {
    const T beyond = (sign > 0 ? b > a : b < a) ? b : a;
    const T chosen = a == b ? from_bits(sign > 0 ? bits(a) & bits(b) : bits(a) | bits(b)) : beyond;
    return a != a ? a : b != b ? b : chosen;
  }
#if OG_DEVICE
  static OG_FN float of(float a, float b) {
    float chosen;
    if constexpr (sign > 0) asm("max.NaN.f32 %0, %1, %2;" : "=f"(chosen) : "f"(a), "f"(b));
    else asm("min.NaN.f32 %0, %1, %2;" : "=f"(chosen) : "f"(a), "f"(b));
    return chosen;
  }
#endif
};
template <> struct Join<How::largest> : Extreme<1> {};
template <> struct Join<How::smallest> : Extreme<-1> {};

// Of n values, in pairs of pairs.
template <class J, int n, class T> OG_FN T joined(const T* x) {
  if constexpr (n == 1) return x[0];
  else return J::of(joined<J, n / 2>(x), joined<J, n - n / 2>(x + n / 2));
}

// How each reduction of a pass joins, and how sums do.
template <class F, int pass> struct Reducing { template <int k> using Of = Join<F::how(pass, k)>; };
struct Adding { template <int k> using Of = Join<How::add>; };

// What the n <= 32 threads of a group, neighbours in a warp, have; all of the warp's threads come here.
template <class J, int n, class T> OG_FN T met(T x) {
  OG_UNROLL for (int d = n / 2; d > 0; d /= 2) x = J::of(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}

// The first n of x become those of all threads of a row, joined as `J` says. Warps meet in two places by turns: before
// one writes to a place again, all have met in the other.
template <class T, int threads, int most, int beside> struct Meeting {
  static constexpr bool warps = beside == 1 && threads > warp_size, shared = warps || (beside > 1 && threads > 1);
  static constexpr int slots = warps ? threads / warp_size : beside > 1 ? threads * beside : 1;
  double (*place)[most][slots];
  int turn;
  template <class J, int n> OG_FN void meet(T (&x)[most]) {
    const int thread = (int)threadIdx.x;
    each<n>([&](auto k) {
      using Own = typename J::template Of<k.value>;
      typename Own::template Wide<T> wide = x[k.value];
      if constexpr (beside == 1) wide = met<Own, (warps ? warp_size : threads)>(wide);
      if constexpr (warps) {
        if (thread % warp_size == 0) place[turn][k.value][thread / warp_size] = (double)wide;
      } else if constexpr (shared) {
        place[turn][k.value][thread] = (double)wide;
      }
      x[k.value] = (T)wide;
    });
    if constexpr (shared) {
      __syncthreads();
      each<n>([&](auto k) {
        using Own = typename J::template Of<k.value>;
        using Wide = typename Own::template Wide<T>;
        const double* own = place[turn][k.value];
        if constexpr (warps) {
          x[k.value] = (T)met<Own, slots>((Wide)own[thread % slots]);
        } else {
          Wide total = (Wide)own[thread % beside];
          OG_UNROLL for (int t = 1; t < threads; ++t) total = Own::of(total, (Wide)own[t * beside + thread % beside]);
          x[k.value] = (T)total;
        }
      });
      turn ^= 1;
    }
  }
};

// ---- dividing a row --------------------------------------------------------------------------------------------

// x / d for many x: two products instead of a quotient, 1.5 ulp off at most. The first takes the exponent of 1 / d, so
// that neither overflows, or loses bits, unless the quotient does; 0, infinities and NaN come out as of a division.
struct Inverse {
  float scale, part;  // a power of 2; what is left, 1/2 to 1 where d is no extreme
};
OG_FN Inverse inverse_of(float d) {
  const i32 own = 127 - (i32)(bits(d) >> 23 & 0xff), exponent = own < -126 ? -126 : own;
  const float scale = from_bits((u32)(exponent + 127) << 23);
  return {scale, divide(1.0f, d * scale)};
}
OG_FN float times(float x, Inverse inverse) { return x * inverse.scale * inverse.part; }

// ---- the space -------------------------------------------------------------------------------------------------

// Extents, the cut, and strides (in elements), passed by value; 64-bit words. Axes: those of rows, then those of a row.
// packs: of a row, of one run of it, and of a piece, where several blocks take a row. part[k]: where in `work` sum k
// leaves what groups add up to; -1: there is one group, which completes it.
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

// One group of threads at work on one row after the other.
template <class F, int V, int P, int T, bool held, bool whole, u64 small, class I, int row_rank, int beside, int rank,
          int operands, int sums>
struct RowGroup {
  using Space = RowSpace<rank, operands, sums>;
  using Addend = typename F::Addend;
  using Packs = typename F::template Packs<V>;
  static constexpr int most = F::most > 0 ? F::most : 1, terms = F::terms > 0 ? F::terms : 1;
  static constexpr int threads = T, abreast = beside;
  static constexpr int groups = beside > 1 ? beside : T > warp_size ? 1 : block_size / T;  // of a block

  void* const* base;
  const Space* space;
  Meeting<Addend, T, most, beside> meeting;
  int lane;  // of the T threads
  bool inside;  // of the space; a group beyond goes through the motions of the last row, for the others of its warp
  I end;        // of the packs that it takes
  i64 offset[operands];
  F f;
  Packs pack[P];
  Addend added[F::sums > 0 ? F::sums : 1][P][V];

  OG_FN void start() {
    i64 step[operands];
    OG_UNROLL for (int k = 0; k < operands; ++k) step[k] = space->strides[k][rank - 1];
    f.steps(step);
  }

  OG_FN bool exists(I q) const { return whole || q < end; }

  // The column of pack q of the row, within its run, to which `f` is moved.
  OG_FN i64 column(I q) {
    if constexpr (row_rank == 1) {
      return (i64)q * V;
    } else {
      const I run_packs = (I)space->run_packs, run = q / run_packs;
      i64 here[operands];
      OG_UNROLL for (int k = 0; k < operands; ++k) here[k] = offset[k];
      move_along<I, rank - row_rank, rank - 1>(*space, run, here);
      f.move(base, here);
      return (i64)(q - run * run_packs) * V;
    }
  }

  // Pack p of every thread.
  template <int pass, Reading how> OG_FN void fetch_one(I first, int p) {
    if constexpr (F::template fetches<pass, how, small>()) {
      const I q = first + (I)(p * T + lane);
      if (exists(q)) f.template fetch<pass, how, small>(pack[p], column(q));
    }
  }
  template <int pass, Reading how> OG_FN void fetch(I first) {
    OG_UNROLL for (int p = 0; p < P; ++p) fetch_one<pass, how>(first, p);
  }

  // P packs of every thread: what they add to each reduction.
  template <int pass> OG_FN void compute(I first, Addend (&total)[most]) {
    if constexpr (held) OG_UNROLL for (int p = 0; p < P && p < ahead; ++p) fetch_one<pass, Reading::cached>(first, p);
    OG_UNROLL for (int p = 0; p < P; ++p) {
      if constexpr (held) {
        if (p + ahead < P) fetch_one<pass, Reading::cached>(first, p + ahead);
      }
      const I q = first + (I)(p * T + lane);
      if (exists(q)) {
        Addend s[terms][V];
        f.template compute<pass, held>(pack[p], column(q), inside, s);
        each<F::reductions(pass)>([&](auto k) {
          using J = Join<F::how(pass, k.value)>;
          total[k.value] = J::of(total[k.value], joined<J, V>(s[k.value]));
        });
        if constexpr (pass + 1 == F::passes && F::sums > 0) {
          if (inside) {
            each<F::sums>([&](auto k) {
              const Addend* own = s[F::reductions(pass) + k.value];
              if constexpr (F::adds_row(k.value)) {
                added[k.value][0][0] += joined<Join<How::add>, V>(own);
              } else {
                OG_UNROLL for (int v = 0; v < V; ++v) added[k.value][p][v] += own[v];
              }
            });
          }
        }
      }
    }
  }

  template <int pass> static OG_FN void nothing(Addend (&total)[most]) {
    each<F::reductions(pass)>(
        [&](auto k) { total[k.value] = Join<F::how(pass, k.value)>::template nothing<Addend>(); });
  }

  // What packs from `first` on add to the reductions of a pass, of a row that is not held.
  template <int pass> OG_FN void walk(I first, Addend (&total)[most]) {
    double whole_way[most];  // sums of stretches are added up in double
    each<F::reductions(pass)>([&](auto k) { whole_way[k.value] = (double)total[k.value]; });
    OG_ROLLED for (; first < end; first += P * T) {
      Addend part[most];
      nothing<pass>(part);
      fetch<pass, Reading::again>(first);
      compute<pass>(first, part);
      each<F::reductions(pass)>([&](auto k) {
        using J = Join<F::how(pass, k.value)>;
        using Wide = typename J::template Wide<Addend>;
        whole_way[k.value] = (double)J::of((Wide)whole_way[k.value], (Wide)part[k.value]);
      });
    }
    each<F::reductions(pass)>([&](auto k) { total[k.value] = (Addend)whole_way[k.value]; });
  }

  template <int pass> OG_FN void meet(Addend (&total)[most]) {
    meeting.template meet<Reducing<F, pass>, F::reductions(pass)>(total);
  }

  template <int pass = 0> OG_FN void passes() {
    if constexpr (pass < F::passes) {
      Addend total[most];
      nothing<pass>(total);
      if constexpr (held) {
        if constexpr (pass > 0) fetch<pass, Reading::once>(0);  // the first pass's are under way
        compute<pass>(0, total);
      } else {
        walk<pass>(0, total);
      }
      if constexpr (F::reductions(pass) > 0) {
        meet<pass>(total);
        f.template reduced<pass>(total, (Addend)space->length);
      }
      passes<pass + 1>();
    }
  }

  // Moves to a row; what changes with rows follows behind the first loads.
  OG_FN void find(i64 number) {
    inside = number < space->rows;
    end = (I)space->packs;
    OG_UNROLL for (int k = 0; k < operands; ++k) offset[k] = 0;
    if constexpr (rank > row_rank)
      move_along<I, 0, rank - row_rank>(*space, (I)(inside ? number : space->rows - 1), offset);
    f.move(base, offset);
  }
  OG_FN void begin() {
    f.call();
    if constexpr (row_rank > 1) f.move(base, offset);
    f.row();
  }

  OG_FN void row(i64 number) {
    find(number);
    if constexpr (held) fetch<0, Reading::once>(0);
    begin();
    passes();
    if constexpr (row_rank > 1) f.move(base, offset);
    if (lane == 0 && inside) f.finish();
  }

  // ---- one row in pieces: a stage for each pass, and one for the results of rows

  static constexpr int reductions_before(int pass) {
    int n = 0;
    for (int p = 0; p < pass; ++p) n += F::reductions(p);
    return n;
  }
  OG_FN i64 place_of(i64 number, i64 piece) const {
    return (number * space->pieces + piece) * reductions_before(F::passes);
  }

  // What follows from the stages before this one.
  template <int stage, int pass = 0> OG_FN void restore(i64 number, const double* work) {
    if constexpr (pass < stage && F::reductions(pass) > 0) {
      Addend total[most];
      nothing<pass>(total);
      if (inside) {
        OG_ROLLED for (i64 piece = lane; piece < space->pieces; piece += T) {
          const double* left = work + place_of(number, piece) + reductions_before(pass);
          each<F::reductions(pass)>([&](auto k) {
            total[k.value] = Join<F::how(pass, k.value)>::of(total[k.value], (Addend)left[k.value]);
          });
        }
      }
      meet<pass>(total);
      f.template reduced<pass>(total, (Addend)space->length);
    }
    if constexpr (pass < stage) restore<stage, pass + 1>(number, work);
  }

  template <int stage> OG_FN void piece(i64 number, i64 piece, double* work) {
    find(number);
    begin();
    restore<stage>(number, work);
    if constexpr (stage == F::passes) {
      if (lane == 0 && inside) f.finish();
    } else {
      const i64 first = piece * space->piece_packs, last = first + space->piece_packs;
      end = (I)(last < space->packs ? last : space->packs);
      Addend total[most];
      nothing<stage>(total);
      walk<stage>((I)first, total);
      if constexpr (F::reductions(stage) > 0) {
        meet<stage>(total);
        double* left = work + place_of(number, piece) + reductions_before(stage);
        if (lane == 0 && inside) OG_UNROLL for (int k = 0; k < F::reductions(stage); ++k) left[k] = (double)total[k];
      }
    }
  }

  // What the group has added up over its rows.
  OG_FN void leave(I group, Addend* work) {
    each<F::sums>([&](auto k) {
      constexpr int operand = F::sum_operand(k.value);
      const i64 part = space->part[k.value];
      if constexpr (F::adds_row(k.value)) {
        Addend total[most] = {added[k.value][0][0]};
        meeting.template meet<Adding, 1>(total);
        if (lane == 0 && inside) {
          if (part < 0) F::total(k.value, base[operand], 0, total[0]);
          else work[part + (i64)group] = total[0];
        }
      } else if (inside) {
        OG_UNROLL for (int p = 0; p < P; ++p) {
          const I q = (I)(p * T + lane);
          if (!exists(q)) continue;
          if (part < 0) {
            const i64 step = space->strides[operand][rank - 1];
            OG_UNROLL for (int v = 0; v < V; ++v)
              F::total(k.value, base[operand], ((i64)q * V + v) * step, added[k.value][p][v]);
          } else {
            Pack<Addend, V> own;
            OG_UNROLL for (int v = 0; v < V; ++v) own.item[v] = added[k.value][p][v];
            store_whole(work + part + (i64)group * space->length + (i64)q * V, own);
          }
        }
      }
    });
  }
};

// A group at the start, and which of its block's it is. beside > 1: neighbouring threads take neighbouring rows, so
// many of them, since memory runs along these, and the T threads of a row meet in shared memory alone.
template <class Group, class Space> OG_FN i64 set_up(Group& g, void* const* base, const Space& space) {
  constexpr int T = Group::threads, beside = Group::abreast;
  if constexpr (decltype(g.meeting)::shared) {
    __shared__ double place[2][Group::most][decltype(g.meeting)::slots];
    g.meeting.place = place;
    g.meeting.turn = 0;
  }
  g.base = base;
  g.space = &space;
  g.start();
  const int thread = (int)threadIdx.x;
  g.lane = beside > 1 ? thread / beside : thread % T;
  return beside > 1 ? thread % beside : thread / T;
}

// held: a row fits into P packs of each of its T threads; whole: it fills them; small: bits of the operands that do not
// wait in registers.
template <class F, int V, int P, int T, bool held, bool whole, u64 small, class I, int row_rank, int beside, int rank,
          int operands, int sums>
OG_FN void reduce_rows(void* const* base, const RowSpace<rank, operands, sums>& space, typename F::Addend* work) {
  using Group = RowGroup<F, V, P, T, held, whole, small, I, row_rank, beside, rank, operands, sums>;
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
template <class F, int V, int P, int T, u64 small, class I, int row_rank, int beside, int stage, int rank, int operands>
OG_FN void reduce_pieces(void* const* base, const RowSpace<rank, operands, 0>& space, double* work) {
  using Group = RowGroup<F, V, P, T, false, false, small, I, row_rank, beside, rank, operands, 0>;
  Group g;
  const i64 own = set_up(g, base, space);
  const i64 pieces = stage == F::passes ? 1 : space.pieces, block = (i64)blockIdx.x / pieces;
  g.template piece<stage>(block * Group::groups + own, (i64)blockIdx.x - block * pieces, work);
}

}  // namespace og
