#pragma once
#include "cuda/row_group.cuh"

// A long row that several groups of threads share, a piece each: a stage for each pass, and one for the results of
// rows. The results of a pass over the pieces are left in `work`; each group of the next stage joins them in the same
// order.

namespace og {

template <class Group> struct RowPieces : Group {
  using F = typename Group::Functor;
  using I = typename Group::Index;
  using Addend = typename Group::Addend;
  static constexpr int most = Group::most, threads = Group::threads;

  static constexpr int reductions_before(int pass) {
    int n = 0;
    for (int p = 0; p < pass; ++p) n += F::reductions(p);
    return n;
  }
  OG_FN i64 place_of(i64 number, i64 piece) const {
    return (number * this->space->pieces + piece) * reductions_before(F::passes);
  }

  // Computes the values that follow from the stages before this one.
  template <int stage, int pass = 0> OG_FN void restore(i64 number, const double* work) {
    if constexpr (pass < stage && F::reductions(pass) > 0) {
      Addend total[most];
      Group::template nothing<pass>(total);
      if (this->inside) {
        OG_ROLLED for (i64 piece = this->lane; piece < this->space->pieces; piece += threads) {
          const double* left = work + place_of(number, piece) + reductions_before(pass);
          each<F::reductions(pass)>([&](auto k) {
            total[k.value] = Join<F::how(pass, k.value)>::of(total[k.value], (Addend)left[k.value]);
          });
        }
      }
      this->template reduce<pass>(total);
      this->f.template reduced<pass>(total, (Addend)this->space->length);
    }
    if constexpr (pass < stage) restore<stage, pass + 1>(number, work);
  }

  template <int stage> OG_FN void piece(i64 number, i64 piece, double* work) {
    this->find(number);
    this->begin();
    restore<stage>(number, work);
    if constexpr (stage == F::passes) {
      if (this->lane == 0 && this->inside) this->f.finish();
    } else {
      const i64 first = piece * this->space->piece_packs, last = first + this->space->piece_packs;
      this->end = (I)(last < (i64)this->end ? last : (i64)this->end);
      if (piece > 0) this->apart = 0;
      Addend total[most];
      Group::template nothing<stage>(total);
      this->template walk<stage>((I)first, total);
      if constexpr (F::reductions(stage) > 0) {
        this->template reduce<stage>(total);
        double* left = work + place_of(number, piece) + reductions_before(stage);
        if (this->lane == 0 && this->inside)
          OG_UNROLL for (int k = 0; k < F::reductions(stage); ++k) left[k] = (double)total[k];
      }
    }
  }
};

}  // namespace og
