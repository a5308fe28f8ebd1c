#include "processor.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

namespace longgraft {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers leaf(unsigned number, unsigned part) {
  Registers r;
  if (!__get_cpuid_count(number, part, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
  return r;
}

bool bit(unsigned word, int index) { return word >> index & 1u; }

// Which register states the operating system saves: bits 1-2 AVX, 5-7 AVX-512.
unsigned saved_states() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace

Processor inspect_processor() {
  Processor found;
  const Registers basic = leaf(1, 0), more = leaf(7, 0), newer = leaf(7, 1);
  if (!bit(basic.ecx, 27)) return found;  // OSXSAVE: xgetbv may be asked
  const unsigned states = saved_states();
  found.avx2 = (states & 0x6u) == 0x6u && bit(basic.ecx, 12) && bit(basic.ecx, 29) && bit(more.ebx, 5);
  found.avx512 = found.avx2 && (states & 0xe6u) == 0xe6u && bit(more.ebx, 16) && bit(more.ebx, 17) &&
                 bit(more.ebx, 30) && bit(more.ebx, 31);
  found.vnni = found.avx512 && bit(more.ecx, 11);
  found.multiplies_bf16 = bit(newer.eax, 5) || bit(more.edx, 22);
  found.multiplies_f16 = bit(more.edx, 23) || bit(newer.eax, 21);
  return found;
}

}  // namespace longgraft

#else
namespace longgraft {
Processor inspect_processor() { return {false, false, false, true, true}; }
}  // namespace longgraft
#endif
