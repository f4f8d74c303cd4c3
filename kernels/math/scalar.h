#pragma once
#include "math/activations.h"
#include "math/arith.h"
#include "math/bessel.h"
#include "math/cast.h"
#include "config.h"
#include "math/convert.h"
#include "math/derivatives.h"
#include "math/erf.h"
#include "math/exp.h"
#include "math/gelu_derivatives.h"
#include "math/integer.h"
#include "math/inverse.h"
#include "math/lane_memory.h"
#include "math/log.h"
#include "math/normal.h"
#include "math/philox.h"
#include "math/power.h"
#include "math/power_derivatives.h"
#include "math/special.h"
#include "math/trig32.h"
#include "math/trig64.h"

// The whole scalar library. Everything computes in float or double; convert.h converts to and from 16-bit storage.

#if OG_LANES
namespace og {
#define OG_EACH(f) \
  OG_FN floats f(floats x) { return each_lane([](float a) OG_LAMBDA { return f(a); }, x); }
OG_EACH(sin)
OG_EACH(cos)
OG_EACH(tan)
OG_EACH(asin)
OG_EACH(acos)
OG_EACH(atan)
OG_EACH(sinh)
OG_EACH(cosh)
OG_EACH(asinh)
OG_EACH(acosh)
OG_EACH(atanh)
OG_EACH(lgamma)
OG_EACH(digamma)
OG_EACH(trigamma)
OG_EACH(erfc)
OG_EACH(erfcx)
OG_EACH(log_ndtr)
OG_EACH(erfinv)
OG_EACH(ndtri)
OG_EACH(i0)
OG_EACH(i0e)
OG_EACH(i0e_slope)
OG_EACH(i1)
OG_EACH(i1e)
#undef OG_EACH
OG_FN floats fmod(floats x, floats y) { return each_lane([](float a, float b) OG_LAMBDA { return fmod(a, b); }, x, y); }
OG_FN floats mod(floats x, floats y) { return each_lane([](float a, float b) OG_LAMBDA { return mod(a, b); }, x, y); }
}  // namespace og
#endif
