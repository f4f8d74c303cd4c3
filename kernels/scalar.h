#pragma once
#include "activations.h"
#include "arith.h"
#include "cast.h"
#include "config.h"
#include "convert.h"
#include "derivatives.h"
#include "erf.h"
#include "exp.h"
#include "integer.h"
#include "inverse.h"
#include "log.h"
#include "philox.h"
#include "power.h"
#include "special.h"
#include "trig32.h"
#include "trig64.h"

// The whole scalar library. Everything computes in float or double; convert.h is the way to and from 16-bit storage.
