// Everything a .cu file may use without including it: force-included when the emulator compiles a kernel
// with the system C++ compiler. Includes no host header, so that compiling stays fast and nothing but
// CUDA's own names is visible.
#pragma once
#include "emulator/interface.h"

#ifdef CUPAGED_EMULATOR_CHECK
// The places in reports are those that call the emulator's functions, which must not be calls
// themselves.
#define inline inline __attribute__((always_inline))
#endif
#include "emulator/atomics.h"
#include "emulator/bits.h"
#include "emulator/device_math.h"
#include "emulator/half.h"
#include "emulator/hooks.h"
#include "emulator/kernel_export.h"
#include "emulator/keywords.h"
#include "emulator/vector_types.h"
#include "emulator/warp.h"
#ifdef CUPAGED_EMULATOR_CHECK
#undef inline
#endif

#define threadIdx (cupaged_emulator::thread_index())
#define blockIdx (cupaged_emulator::block_index())
#define blockDim (cupaged_emulator::block_dim())
#define gridDim (cupaged_emulator::grid_dim())
#define warpSize 32
