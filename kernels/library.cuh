#pragma once
#include "rolled.cuh"
#include "singles.cuh"

// All skeletons of pointwise kernels, for many kernels in one text.
