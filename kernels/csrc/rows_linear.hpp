// y = x * weight^T + bias on the CPU: picks a kernel for this processor and cuts the work for the threads.
#pragma once

#include "kernel.hpp"

namespace longgraft {

// The kernel called `name` ("avx512", "avx2", "plain"), or null when it was not built or the processor lacks it.
const Kernel* find_kernel(const char* name);

// Compute `linear` with `kernel` on at most `threads` threads. Throws std::bad_alloc.
// Scratch: 4 bytes per element of x (of 512 rows at most) and 0.3 MB per thread.
void rows_linear(const Kernel& kernel, const Linear& linear, int threads);

}  // namespace longgraft
