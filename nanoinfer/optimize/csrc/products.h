// Products of a few rows with weights that are read once, from memory.
//
// Weights are stored in slabs of 32 outputs, interleaved along K: each instruction adds weights times one broadcast
// number to 32 sums, and no sum over the lanes of a register is needed. A thread's slabs of all products of a step are
// contiguous, so it reads memory sequentially. Sums run over K in one order whatever the number of rows.
#pragma once

#include "team.h"
#include "vectors.h"

namespace {

constexpr int SLAB = 32;   // outputs a slab: two vectors
constexpr int GROUP = 32;  // int8: numbers along K that share a scale. K is padded to a multiple of it.

int padded(int k) { return (k + GROUP - 1) / GROUP * GROUP; }

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Inputs of a product, in the format of the weights.
struct Input {
  Buffer data, scale, offset;  // offset: int8 only, see dot()
  int k = 0, row_bytes = 0;    // padded

  void reserve(int rows, int k_max) {
    data.at_least(size_t(rows) * k_max * 4);
    scale.at_least(size_t(rows) * (k_max / GROUP) * 4);
    offset.at_least(size_t(rows) * (k_max / GROUP) * 4);
  }
  // x has `padded` floats, 0 beyond K.
  void put(Kind kind, int row, const float* x, int padded) {
    k = padded, row_bytes = padded * (kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1);
    if (kind == FLOAT32) {
      std::memcpy(data.as<float>() + size_t(row) * k, x, size_t(k) * 4);
    } else if (kind == BFLOAT16) {
      to_bf16(x, data.as<uint16_t>() + size_t(row) * k, k);
    } else {
      int8_t* to = data.as<int8_t>() + size_t(row) * k;
      for (int g = 0; g < k / GROUP; g++, x += GROUP, to += GROUP) {
        const F16 a = load<F16>(x), b = load<F16>(x + 16);
        const float most = largest(larger(magnitude(a), magnitude(b)));
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        const I16 low = nearest(a * inverse), high = nearest(b * inverse);
        store(to, __builtin_convertvector(low, C16)), store(to + 16, __builtin_convertvector(high, C16));
        scale.as<float>()[row * (k / GROUP) + g] = most / 127.0f;
        offset.as<int32_t>()[row * (k / GROUP) + g] = -128 * total(low + high);
      }
    }
  }
  // The rounding error of x in int8, into the next row. Changes x.
  void put_rest(int row, float* x, int padded) {
    for (int i = 0; i < padded; i++) x[i] -= data.as<int8_t>()[size_t(row) * k + i] * scale.as<float>()[(row * k + i) / GROUP];
    put(INT8, row + 1, x, padded);
  }
};

// Weights of a product, divided among threads. A slab has, for every GROUP of numbers along K, its scales (int8) and
// then lines of weights: a LINE is the numbers of one instruction (1, 2 or 4) for each of the slab's outputs.
constexpr int LINE = 4 * SLAB;  // bytes
constexpr int lines(Kind kind) { return kind == FLOAT32 ? GROUP : kind == BFLOAT16 ? GROUP / 2 : GROUP / 4; }  // a group
constexpr int scales(Kind kind) { return kind == INT8 ? SLAB * 2 : 0; }                                       // bytes a group

struct Linear {
  struct Share { int begin, end; char* at; };  // slabs, and the address of the first
  std::vector<Share> shares;                   // one a thread
  Buffer bias;
  int n = 0, k = 0;  // k padded
  int n_slabs() const { return (n + SLAB - 1) / SLAB; }
  size_t slab_bytes(Kind kind) const { return size_t(k / GROUP) * (lines(kind) * LINE + scales(kind)); }

  // Copies the slabs and biases (or null) of cpu_kernel.py.
  void take(Kind kind, const char* slabs, const float* b) {
    for (Share& share : shares)
      std::memcpy(share.at, slabs + share.begin * slab_bytes(kind), (share.end - share.begin) * slab_bytes(kind));
    bias.resize(size_t(n_slabs()) * SLAB * 4);
    if (b) std::memcpy(bias.as<float>(), b, size_t(n) * 4);
  }
};

// Sums of ROWS rows over K for one slab, in one order for any ROWS.
template <Kind KIND, int ROWS>
void dot(const char* p, const Input& x, int row, F16 (&result)[ROWS][2]) {
  F16 acc[ROWS][2] = {};  // local, so that it stays in registers
  const int groups = x.k / GROUP;
  const char* in = x.data.as<char>() + size_t(row) * x.row_bytes;
  for (int g = 0; g < groups; g++) {
    const uint16_t* scale = reinterpret_cast<const uint16_t*>(p);
    I16 whole[ROWS][2];
    if constexpr (KIND == INT8) {
      // The instruction takes one unsigned operand, so weights are stored with 128 added: sum((w + 128) x) is
      // 128 sum(x) too large, and the sums of a group start at the negative of that.
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) whole[r][0] = whole[r][1] = I16{} + x.offset.as<int32_t>()[size_t(row + r) * groups + g];
      prefetch_ahead<ROWS>(p);
      p += scales(KIND);
    }
    for (int i = 0; i < lines(KIND); i++, p += LINE, in += 4) {
      U16 a = load<U16>(p), b = load<U16>(p + 64);
      prefetch_ahead<ROWS>(p), prefetch_ahead<ROWS>(p + 64);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const char* of = in + size_t(r) * x.row_bytes;
        if constexpr (KIND == FLOAT32) {
          F16 v = all(load<float>(of));
          acc[r][0] += (F16)a * v;
          acc[r][1] += (F16)b * v;
        } else if constexpr (KIND == BFLOAT16) {
          uint32_t pair = load<uint32_t>(of);  // along K
#if defined(__AVX512BF16__)
          __m512bh v = (__m512bh)_mm512_set1_epi32(int(pair));
          acc[r][0] = (F16)_mm512_dpbf16_ps((__m512)acc[r][0], (__m512bh)a, v);
          acc[r][1] = (F16)_mm512_dpbf16_ps((__m512)acc[r][1], (__m512bh)b, v);
#else
          uint32_t low = pair << 16, high = pair & 0xffff0000u;
          F16 v0 = all(load<float>(&low)), v1 = all(load<float>(&high));
          acc[r][0] += (F16)(a << 16) * v0;
          acc[r][0] += (F16)(a & 0xffff0000u) * v1;
          acc[r][1] += (F16)(b << 16) * v0;
          acc[r][1] += (F16)(b & 0xffff0000u) * v1;
#endif
        } else {
#if defined(__AVX512VNNI__)
          __m512i v = _mm512_set1_epi32(load<int>(of));
          whole[r][0] = (I16)_mm512_dpbusd_epi32((__m512i)whole[r][0], (__m512i)a, v);
          whole[r][1] = (I16)_mm512_dpbusd_epi32((__m512i)whole[r][1], (__m512i)b, v);
#else
          for (int j = 0; j < 4; j++) {
            whole[r][0] += (I16)((a >> (8 * j)) & 255u) * int32_t(int8_t(of[j]));
            whole[r][1] += (I16)((b >> (8 * j)) & 255u) * int32_t(int8_t(of[j]));
          }
#endif
        }
      }
    }
    if constexpr (KIND == INT8) {
      const F16 low = read16(scale), high = read16(scale + 16);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        float v = x.scale.as<float>()[size_t(row + r) * groups + g];
        acc[r][0] += __builtin_convertvector(whole[r][0], F16) * (low * v);
        acc[r][1] += __builtin_convertvector(whole[r][1], F16) * (high * v);
      }
    }
  }
  std::memcpy(result, acc, sizeof acc);
}

// As many rows as fill tiles of ROWS, against one slab. Returns the next row.
template <Kind KIND, int ROWS, class Use>
int tiles(const char* slab, const float* bias, const Input& x, int row, int rows, Use&& use) {
  for (; rows - row >= ROWS; row += ROWS) {
    F16 acc[ROWS][2];
    dot<KIND, ROWS>(slab, x, row, acc);
    for (int r = 0; r < ROWS; r++) use(row + r, acc[r][0] + load<F16>(bias), acc[r][1] + load<F16>(bias + 16));
  }
  return row;
}

// All rows against a thread's slabs. A slab stays in the caches for all rows.
template <Kind KIND, class Use>
void product(const Linear& w, const Input& x, int rows, int thread, Use&& use) {
  const Linear::Share& share = w.shares[thread];
  const char* slab = share.at;
  for (int s = share.begin; s < share.end; s++, slab += w.slab_bytes(KIND)) {
    const float* bias = w.bias.as<float>() + s * SLAB;
    auto with_slab = [&](int r, F16 a, F16 b) { use(r, s, a, b); };
    int row = tiles<KIND, 8>(slab, bias, x, 0, rows, with_slab);
    row = tiles<KIND, 4>(slab, bias, x, row, rows, with_slab);
    row = tiles<KIND, 2>(slab, bias, x, row, rows, with_slab);
    tiles<KIND, 1>(slab, bias, x, row, rows, with_slab);
  }
}

}  // namespace
