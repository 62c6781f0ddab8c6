// Everything a .cu file may use without including it: force-included when the emulator compiles a kernel
// with the system C++ compiler. Includes no host header, so that compiling stays fast and nothing but
// CUDA's own names is visible.
#pragma once
#include "emulator/atomics.h"
#include "emulator/bits.h"
#include "emulator/device_math.h"
#include "emulator/hooks.h"
#include "emulator/interface.h"
#include "emulator/kernel_export.h"
#include "emulator/keywords.h"
#include "emulator/vector_types.h"
#include "emulator/warp.h"

#define threadIdx (cupaged_emulator::current->thread_index)
#define blockIdx (cupaged_emulator::current->block->block_index)
#define blockDim (cupaged_emulator::current->block->block_dim)
#define gridDim (cupaged_emulator::current->block->grid_dim)
#define warpSize 32
