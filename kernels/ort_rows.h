#pragma once
#include "host_rows.h"
#include "ort_op.h"

// A library with loops over rows, too: kernels/ort_call.h calls og::launch_rows as it calls og::launch, with boxes of rows in
// the place of elements.
