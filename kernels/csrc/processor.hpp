// What this processor and operating system can do. Asked once per call of the functions; cheap.
#pragma once

namespace longgraft {

struct Processor {
  bool avx2 = false;             // with FMA and F16C
  bool avx512 = false;           // F, BW, DQ, VL
  bool vnni = false;             // AVX512_VNNI
  bool multiplies_bf16 = false;  // AVX512_BF16 or AMX_BF16
  bool multiplies_f16 = false;   // AVX512_FP16 or AMX_FP16
};

// Ask the processor itself (not the compiler's runtime, which not every tool chain fills in).
Processor inspect_processor();

}  // namespace longgraft
