// Packs weights in 4 bits. Plain loops over 32 numbers, which compilers turn into vector instructions.

#include "int4_pack.hpp"

#include <atomic>
#include <cmath>
#include <cstring>

#include "int4.hpp"
#include "team.hpp"

namespace longgraft::int4 {
namespace {

constexpr int kSize = int(kBlock);
constexpr int kTaken = 16;  // outputs that a thread takes at a time: their steps fill a cache line
constexpr float kTop = 15.0f, kLeastStep = 0x1p-120f;  // 1 / d is finite

float rounded(float value) { return bits_to_float(std::uint32_t(round_bf16(value)) << 16) + 0.0f; }  // no -0

// Nearest whole number to a value clamped to [0, 15], even of two: adding 2^23 leaves no bits for a fraction.
inline float level(float value) {
  const float above = value > 0.0f ? value : 0.0f, within = above < kTop ? above : kTop;
  return (within + 0x1p23f) - 0x1p23f;
}

float sum(float* numbers) {
  for (int i = 0; i < 16; ++i) numbers[i] += numbers[i + 16];
  for (int i = 0; i < 8; ++i) numbers[i] += numbers[i + 8];
  for (int i = 0; i < 4; ++i) numbers[i] += numbers[i + 4];
  numbers[0] += numbers[2], numbers[1] += numbers[3];
  return numbers[0] + numbers[1];
}

struct Found {
  float d, m, error;
};

float error_of(const float* w, float d, float m) {
  const float scale = d >= kLeastStep ? 1.0f / d : 0.0f, start = -m * scale;
  float squares[kSize];
  for (int i = 0; i < kSize; ++i) {
    const float exact = w[i] * scale + start, off = level(exact) - exact;
    squares[i] = off * off;
  }
  return std::sqrt(sum(squares)) * d;
}

void keep_better(Found& best, const float* w, float d, float m) {
  const float error = error_of(w, d, m);
  if (error < best.error) best = {d, m, error};
}

void levels(const float* w, float d, float m, float* q) {
  const float step = d > 0.0f ? d : 1.0f;
  for (int i = 0; i < kSize; ++i) q[i] = level((w[i] - m) / step);
}

void try_line(Found& best, const float* w) {
  float q[kSize], numbers[kSize];
  levels(w, best.d, best.m, q);
  std::memcpy(numbers, q, sizeof numbers);
  const float mean = sum(numbers) / kSize;
  std::memcpy(numbers, w, sizeof numbers);
  const float middle = sum(numbers) / kSize;
  for (int i = 0; i < kSize; ++i) q[i] -= mean;
  for (int i = 0; i < kSize; ++i) numbers[i] = q[i] * q[i];
  const float spread = sum(numbers);
  if (!(spread > 0.0f)) return;
  for (int i = 0; i < kSize; ++i) numbers[i] = q[i] * w[i];
  const float slope = sum(numbers) / spread;
  if (slope > 0.0f) keep_better(best, w, rounded(slope), rounded(middle - slope * mean));
}

Found best_of(const Packing& packing, const float* w) {
  float low = w[0], high = w[0];
  for (int i = 1; i < kSize; ++i) low = w[i] < low ? w[i] : low, high = w[i] > high ? w[i] : high;
  const float span = high - low;
  Found best{};
  for (std::int64_t i = 0; i < packing.count; ++i) {
    const float d = rounded(span * packing.tries[i].factor), m = rounded(low + span * packing.tries[i].offset);
    if (i == 0) best = {d, m, error_of(w, d, m)};
    else keep_better(best, w, d, m);
  }
  for (int i = 0; i < packing.lines; ++i) try_line(best, w);
  return best;
}

// Write what an output has in a block; `used`: inputs that are no filling.
void write(std::uint8_t* block, int output, const float* w, const Found& found, std::int64_t used) {
  float q[kSize];
  levels(w, found.d, found.m, q);
  std::uint8_t whole[kSize];
  for (int i = 0; i < kSize; ++i) whole[i] = i < used ? std::uint8_t(q[i]) : 0;
  std::uint8_t* to = block + output * packed::kInputs;
  for (int pair = 0; pair < kPairs; ++pair, to += packed::kStepValues) {
    const std::uint8_t* const from = whole + pair * 2 * packed::kInputs;
    for (int i = 0; i < packed::kInputs; ++i) to[i] = std::uint8_t(from[i] | from[i + packed::kInputs] << 4);
  }
  const std::uint16_t factors[] = {round_bf16(found.d), round_bf16(found.m)};
  for (int i = 0; i < 2; ++i) std::memcpy(block + kHalves + i * kFactors + output * 2, factors + i, 2);
}

struct Shared {
  const Packing& packing;
  std::atomic<std::int64_t> taken{0};
};

void pack_row(const Packing& packing, std::int64_t row) {
  const float* w = packing.weight + row * packing.blocks * kBlock;
  std::uint8_t* to = packing.values + row / packed::kColumns * packing.blocks * kLayout.block_bytes;
  for (std::int64_t block = 0; block < packing.blocks; ++block, w += kBlock, to += kLayout.block_bytes)
    write(to, int(row % packed::kColumns), w, best_of(packing, w), packing.inputs - block * kBlock);
}

void pack_rows(void* context) {
  Shared& shared = *static_cast<Shared*>(context);
  const std::int64_t rows = shared.packing.panels * packed::kColumns;
  std::int64_t first;
  while ((first = shared.taken.fetch_add(kTaken)) < rows)
    for (std::int64_t row = first; row < first + kTaken; ++row) pack_row(shared.packing, row);
}

}  // namespace

void pack(const Packing& packing, int threads) {
  Shared shared{packing};
  run_team(threads, pack_rows, &shared);
}

}  // namespace longgraft::int4
