#pragma once
#include "math/exp.h"
#include "math/lanes.h"

// e^(x - c) for several numbers c, each the same for all x. e^x = 2^n (1 + t) is computed once, and e^-c = 2^k m once
// per number, so that 2^(n + k) (m + m t) is left for each. At most 2.2 ulp; nothing is rounded before the exponential,
// while x - c alone would be. If a |c| is beyond 2^17, e^x has no reduction for an x near c: then each is computed
// alone.
//
// opgraph/codegen/shifts.py decides where that is done.

namespace og {

/// e^-c or e^c of a number c: 2^n m. `near`: true if c is small enough.
struct Shift {
  float m = 1, n = 0;
  bool near = true;
};
OG_SLOW Shift shift_by(float c) {
  Shift s;
  s.near = abs(c) <= 0x1p17f;
  s.m = 1 + exp_reduce(s.near ? c : 0.0f, s.n);
  return s;
}

/// e^x = 2^n (1 + t), for |x| up to twice the largest shift: beyond that e^(x - c) is 0 or infinity anyway.
template <class T> struct Exponential {
  T n, t;
};
template <class T> OG_FN Exponential<T> exponential_of(T x) {
  Exponential<T> e;
  const T bounded = at_most(at_least(x, (T)-0x1p18f), (T)0x1p18f);
  e.t = keep_nan(x, exp_reduce(bounded, e.n));
  return e;
}

/// x 2^n for a whole n, |n| below 2^22, rounded once.
OG_FN float scale_anywhere(float x, float n) {
  return scale_far(x, at_most(at_least(n, -400.0f), 400.0f));
}
#if OG_LANES
OG_FN floats scale_anywhere(floats x, floats n) { return scale(x, n); }
#endif

/// Passed to a side of a choice if all shifts are near.
struct near_shifts : any_ends {};

template <class T> OG_FN T shifted(Exponential<T> e, Shift s) {
  return scale_anywhere(fma((T)s.m, e.t, (T)s.m), e.n + (T)s.n);
}
/// e^(x - c); `difference` is x - c. If a number is not near: compiled once, because that hardly ever occurs.
template <class T> OG_SLOW T exp_apart(T x) { return exp(x); }
template <class T> OG_FN T shifted_exp(Exponential<T>, Shift, T difference, any_ends) { return exp_apart(difference); }
template <class T> OG_FN T shifted_exp(Exponential<T> e, Shift s, T, near_shifts) { return shifted(e, s); }
#if OG_LANES
OG_FN floats shifted_exp(Exponential<floats> e, Shift s, floats, no_ends&) { return shifted(e, s); }
#endif

}  // namespace og
