// A mapped file whose pages are checked against their CRC-32 the first time they are read. Knows nothing of what it holds.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>

namespace longgraft {

constexpr int32_t kPageBits = 12;
constexpr int64_t kPageBytes = 1ll << kPageBits;

// Thrown where the file does not hold what was written: which page, or -1 for a value outside its range.
struct Corrupted {
  int64_t page;
};

// Table [k][b]: the CRC-32 (reflected polynomial 0xEDB88320, as zlib's) of byte b followed by k zero bytes.
inline const std::array<std::array<uint32_t, 256>, 8>& crc_tables() {
  static const auto tables = [] {
    std::array<std::array<uint32_t, 256>, 8> t{};
    for (uint32_t b = 0; b < 256; ++b) {
      uint32_t c = b;
      for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (0xEDB88320u & (0u - (c & 1u)));
      t[0][b] = c;
    }
    for (size_t k = 1; k < 8; ++k)
      for (uint32_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 255u];
    return t;
  }();
  return tables;
}

// Eight bytes a step: their tables do not wait for one another.
inline uint32_t crc32(const uint8_t* data, int64_t n) {
  const auto& t = crc_tables();
  uint32_t c = 0xFFFFFFFFu;
  for (; n >= 8; n -= 8, data += 8) {
    c ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
    c = t[7][c & 255u] ^ t[6][c >> 8 & 255u] ^ t[5][c >> 16 & 255u] ^ t[4][c >> 24] ^ t[3][data[4]] ^ t[2][data[5]] ^
        t[1][data[6]] ^ t[0][data[7]];
  }
  for (; n > 0; --n, ++data) c = (c >> 8) ^ t[0][(c ^ *data) & 255u];
  return ~c;
}

// Arrays in it begin on pages, so that an aligned int32 lies in one page. `checked` is shared with whoever else reads the file.
struct Pages {
  const uint8_t* data;
  int64_t num_bytes;
  const uint32_t* sums;
  uint8_t* checked;

  void require(int64_t at) const {
    if (!checked[at >> kPageBits]) check(at >> kPageBits);
  }

  int32_t read(int64_t at) const {
    require(at);
    int32_t value;
    std::memcpy(&value, data + at, sizeof value);
    return value;
  }

 private:
  void check(int64_t page) const {
    int64_t begin = page << kPageBits;
    int64_t n = num_bytes - begin < kPageBytes ? num_bytes - begin : kPageBytes;
    if (crc32(data + begin, n) != sums[page]) throw Corrupted{page};
    checked[page] = 1;
  }
};

}  // namespace longgraft
