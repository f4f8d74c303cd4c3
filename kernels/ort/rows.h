#pragma once
#include "cpu/inner_reduction.h"
#include "ort/op.h"

// A library with loops over rows, too: kernels/ort/call.h calls og::launch_inner as it calls og::launch, with boxes of rows in
// the place of elements.
