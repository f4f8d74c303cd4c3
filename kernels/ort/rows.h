#pragma once
#include "cpu/inner_reduction.h"
#include "ort/op.h"

// A library that also has loops over rows: kernels/ort/call.h calls og::launch_inner like og::launch, with boxes of
// rows in place of elements.
