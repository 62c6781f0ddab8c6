// The ends of F32's range, and what is no number in it.
#pragma once
#include "platform.cuh"

constexpr float FLOAT_MAX = 3.4028234663852886e38f;
constexpr float FLOAT_MIN = 1.1754943508222875e-38f;  // smallest with all its bits

DEVICE float negative_infinity() { return __uint_as_float(0xff800000u); }
DEVICE float quiet_nan() { return __uint_as_float(0x7fc00000u); }
