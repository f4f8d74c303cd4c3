#pragma once
#include "cuda/pointwise_unrolled.cuh"
#include "cuda/pointwise_scalar.cuh"

// All skeletons of pointwise kernels, for many kernels in one text.
