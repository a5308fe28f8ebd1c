// The plain kernel: for processors without a kernel of their own and for tests.

#include "norm_tile.hpp"

namespace longgraft::rms {
namespace {

struct Plain {
  static void widen(const std::uint16_t* from, float* to) {
    for (int i = 0; i < kBlockSize; ++i) to[i] = widen_f16(from[i]);
  }
  static void narrow(const float* from, std::uint16_t* to) {
    for (int i = 0; i < kBlockSize; ++i) to[i] = round_f16(from[i]);
  }
};

}  // namespace

const Kernel plain_kernel = kernel_of<Plain>("plain");

}  // namespace longgraft::rms
