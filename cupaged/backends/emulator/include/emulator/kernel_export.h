// What a compiled kernel offers to the launcher: see CUPAGED_EMULATOR_EXPORT.
#pragma once
#include "interface.h"

namespace cupaged_emulator {

template <size_t... INDEX>
struct Indices {};
template <size_t COUNT, size_t... INDEX>
struct MakeIndices : MakeIndices<COUNT - 1, COUNT - 1, INDEX...> {};
template <size_t... INDEX>
struct MakeIndices<0, INDEX...> {
  using type = Indices<INDEX...>;
};

template <class... Parameters, size_t... INDEX>
inline void call_with(void (*kernel)(Parameters...), void* const* parameters, Indices<INDEX...>) {
  kernel(*static_cast<const Parameters*>(parameters[INDEX])...);
}

// `parameters`: one pointer for each parameter of the kernel.
template <class... Parameters>
inline void call(void (*kernel)(Parameters...), void* const* parameters) {
  call_with(kernel, parameters, typename MakeIndices<sizeof...(Parameters)>::type{});
}

}  // namespace cupaged_emulator

// Defines the two functions that the launcher looks up. The anchor lies in the same image as the
// kernel's static shared memory, through which the runtime finds that image in each OS thread.
#define CUPAGED_EMULATOR_EXPORT(kernel)                                                  \
  extern "C" CUPAGED_EMULATOR_API void cupaged_emulator_entry(void* const* parameters) { \
    cupaged_emulator::call(&::kernel, parameters);                                       \
  }                                                                                      \
  extern "C" CUPAGED_EMULATOR_API void* cupaged_emulator_shared_anchor() {               \
    __shared__ unsigned char anchor;                                                     \
    return &anchor;                                                                      \
  }
