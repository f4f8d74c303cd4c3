#pragma once
#include "cuda/row_space.cuh"

// One group of threads, which does one row after the other; see inner_reduction.cuh.

namespace og {

enum { ahead = 2 };  // packs of cached operands that are loaded before they are needed
// once: of a row that is held; cached: the same for many rows, read in each pass; again: of a row that is not held.
enum class Reading { once, cached, again };

// V neighbours. If loose, their address need not be a multiple of 16 bytes.
template <bool loose, int V, class T> OG_FN Pack<T, V> load_run(const T* p) {
  if constexpr (loose) return gather_pack<V>(p, 0, 1);
  else return load_pack<V>(p);
}

// lead >= 0: rows begin at any element. Where operand `lead` is at a multiple of a pack, all operands are, except for
// the `loose` ones. Packs begin there. Elements before the first and after the last pack, fewer than a pack, go one by
// one.
template <class F, int V, int P, int T, bool held, bool whole, u64 small, class I, int row_rank, int adjacent, int lead,
          u64 loose, int rank, int operands, int sums>
struct RowGroup {
  using Functor = F;
  using Index = I;
  using Space = RowSpace<rank, operands, sums>;
  using Addend = typename F::Addend;
  template <int W> using Packs = typename F::template Packs<W>;
  static constexpr int most = F::most > 0 ? F::most : 1, terms = F::terms > 0 ? F::terms : 1;
  static constexpr int threads = T, abreast = adjacent;
  static constexpr int groups = adjacent > 1 ? adjacent : T > warp_size ? 1 : block_size / T;  // of a block
  static constexpr int singles = lead < 0 ? 0 : (2 * V - 2 + T - 1) / T;                   // of a thread

  void* const* base;
  const Space* space;
  BlockReduce<Addend, T, most, adjacent> block_reduce;
  int lane;  // of the T threads
  bool inside;  // of the space; a group beyond it repeats the last row, for the others of its warp
  I end;        // of the packs that it takes
  i64 head;     // elements before the first pack
  I apart;      // elements that are in no pack
  i64 offset[operands];
  F f;
  Packs<V> pack[P];
  Packs<1> single[singles > 0 ? singles : 1];
  Addend added[F::sums > 0 ? F::sums : 1][P][V];

  OG_FN void start() {
    i64 step[operands];
    OG_UNROLL for (int k = 0; k < operands; ++k) step[k] = space->strides[k][rank - 1];
    f.steps(step);
  }

  OG_FN bool exists(I q) const { return whole || q < end; }

  // The column of pack q of the row, within its run. Moves `f` to that run.
  OG_FN i64 column(I q) {
    if constexpr (row_rank == 1) {
      return (lead < 0 ? 0 : head) + (i64)q * V;
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
      if (exists(q)) f.template fetch<pass, how, small, loose>(pack[p], column(q));
    }
  }
  // Single element s of every thread, if there is one.
  template <int pass, Reading how> OG_FN void fetch_single(int s) {
    if constexpr (F::template fetches<pass, how, small>()) {
      const I e = (I)(s * T + lane);
      if (e < apart) f.template fetch<pass, how, small, loose>(single[s], column_apart(e));
    }
  }
  OG_FN i64 column_apart(I e) const { return e < (I)head ? (i64)e : (i64)e + space->length - apart; }
  template <int pass, Reading how> OG_FN void fetch(I first) {
    OG_UNROLL for (int p = 0; p < P; ++p) fetch_one<pass, how>(first, p);
  }
  template <int pass, Reading how> OG_FN void fetch_scalar() {
    OG_UNROLL for (int s = 0; s < singles; ++s) fetch_single<pass, how>(s);
  }

  // Adds W neighbours, of pack p, to each reduction and to the sums over rows.
  template <int pass, int W> OG_FN void add(Packs<W>& in, i64 at, int p, Addend (&total)[most]) {
    Addend s[terms][W];
    f.template compute<pass, held>(in, at, inside, s);
    each<F::reductions(pass)>([&](auto k) {
      using J = Join<F::how(pass, k.value)>;
      total[k.value] = J::of(total[k.value], joined<J, W>(s[k.value]));
    });
    if constexpr (pass + 1 == F::passes && F::sums > 0) {
      if (inside) {
        each<F::sums>([&](auto k) {
          const Addend* own = s[F::reductions(pass) + k.value];
          if constexpr (F::adds_row(k.value)) {
            added[k.value][0][0] += joined<Join<How::add>, W>(own);
          } else {
            static_assert(lead < 0, "a thread has other columns in each row");
            OG_UNROLL for (int v = 0; v < W; ++v) added[k.value][p][v] += own[v];
          }
        });
      }
    }
  }

  // Adds P packs of every thread to each reduction.
  template <int pass> OG_FN void compute(I first, Addend (&total)[most]) {
    if constexpr (held) OG_UNROLL for (int p = 0; p < P && p < ahead; ++p) fetch_one<pass, Reading::cached>(first, p);
    OG_UNROLL for (int p = 0; p < P; ++p) {
      if constexpr (held) {
        if (p + ahead < P) fetch_one<pass, Reading::cached>(first, p + ahead);
      }
      const I q = first + (I)(p * T + lane);
      if (exists(q)) add<pass>(pack[p], column(q), p, total);
    }
  }
  template <int pass> OG_FN void compute_scalar(Addend (&total)[most]) {
    if constexpr (held) fetch_scalar<pass, Reading::cached>();
    OG_UNROLL for (int s = 0; s < singles; ++s) {
      const I e = (I)(s * T + lane);
      if (e < apart) add<pass>(single[s], column_apart(e), 0, total);
    }
  }

  template <int pass> static OG_FN void nothing(Addend (&total)[most]) {
    each<F::reductions(pass)>(
        [&](auto k) { total[k.value] = Join<F::how(pass, k.value)>::template nothing<Addend>(); });
  }

  // Adds the packs from `first` on to the reductions of a pass, for a row that is not held.
  template <int pass> OG_FN void walk(I first, Addend (&total)[most]) {
    if constexpr (singles > 0) {
      fetch_scalar<pass, Reading::again>();
      compute_scalar<pass>(total);
    }
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

  template <int pass> OG_FN void reduce(Addend (&total)[most]) {
    block_reduce.template reduce<Reducing<F, pass>, F::reductions(pass)>(total);
  }

  template <int pass = 0> OG_FN void passes() {
    if constexpr (pass < F::passes) {
      Addend total[most];
      nothing<pass>(total);
      if constexpr (held) {
        if constexpr (pass > 0) {  // those of the first pass are in flight
          fetch<pass, Reading::once>(0);
          fetch_scalar<pass, Reading::once>();
        }
        compute<pass>(0, total);
        compute_scalar<pass>(total);
      } else {
        walk<pass>(0, total);
      }
      if constexpr (F::reductions(pass) > 0) {
        reduce<pass>(total);
        f.template reduced<pass>(total, (Addend)space->length);
      }
      passes<pass + 1>();
    }
  }

  // Moves to a row. Values that change once per row are computed after the first loads.
  OG_FN void find(i64 number) {
    inside = number < space->rows;
    end = (I)space->packs;
    OG_UNROLL for (int k = 0; k < operands; ++k) offset[k] = 0;
    if constexpr (rank > row_rank)
      move_along<I, 0, rank - row_rank>(*space, (I)(inside ? number : space->rows - 1), offset);
    f.move(base, offset);
    if constexpr (lead >= 0) {
      head = -offset[lead] & (V - 1);  // the operand's own address is a multiple
      end = (I)((u64)(space->length - head) / V);
      apart = (I)(space->length - (i64)end * V);
    }
  }
  OG_FN void begin() {
    f.call();
    if constexpr (row_rank > 1) f.move(base, offset);
    f.row();
  }

  OG_FN void row(i64 number) {
    find(number);
    if constexpr (held) {
      fetch<0, Reading::once>(0);
      fetch_scalar<0, Reading::once>();
    }
    begin();
    passes();
    if constexpr (row_rank > 1) f.move(base, offset);
    if (lane == 0 && inside) f.finish();
  }

  // Stores the sums of the group over its rows.
  OG_FN void leave(I group, Addend* work) {
    each<F::sums>([&](auto k) {
      constexpr int operand = F::sum_operand(k.value);
      const i64 part = space->part[k.value];
      if constexpr (F::adds_row(k.value)) {
        Addend total[most] = {added[k.value][0][0]};
        block_reduce.template reduce<Adding, 1>(total);
        if (lane == 0 && inside) {
          if (part < 0) F::total(k, base[operand], 0, total[0]);
          else work[part + (i64)group] = total[0];
        }
      } else if (inside) {
        OG_UNROLL for (int p = 0; p < P; ++p) {
          const I q = (I)(p * T + lane);
          if (!exists(q)) continue;
          if (part < 0) {
            const i64 step = space->strides[operand][rank - 1];
            OG_UNROLL for (int v = 0; v < V; ++v)
              F::total(k, base[operand], ((i64)q * V + v) * step, added[k.value][p][v]);
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

}  // namespace og
