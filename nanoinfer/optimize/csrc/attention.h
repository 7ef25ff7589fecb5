// Attention of the queries that share a KV head, over its keys and values in the blocks of the cache.
#pragma once

#include "vectors.h"

namespace {

int line_of(int length) { return (length + 15) / 16 * 16; }  // padded to whole vectors of scores

// Offsets of a head's keys (and values) in their store, token by token, padded to `line` with valid ones. `soon` are
// those of the next head, which are prefetched while this one is computed.
struct Offsets { const int64_t *here, *soon; int length, line; };

// Prefetch n keys or values.
template <class T>
void prefetch(const T* store, const int64_t* offsets, int n, int d) {
  for (int t = 0; t < n; t++)
    for (int at = 0; at < d; at += 64 / int(sizeof(T))) __builtin_prefetch(store + offsets[t] + at, 0, 2);
}

// Products of G queries [G, d] with eight keys, into `to` [G, line].
template <int G, class T>
void scores(const float* q, const T* keys, const int64_t* offsets, int d, float* to, int line) {
  F16 acc[G][8] = {};
  const int whole = d / 16 * 16;
  for (int i = 0; i < whole; i += 16)
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) {
      F16 k = read16(keys + offsets[t] + i);
#pragma GCC unroll 3
      for (int g = 0; g < G; g++) acc[g][t] += load<F16>(q + size_t(g) * d + i) * k;
    }
  F16 result[G][8];
  std::memcpy(result, acc, sizeof acc);
  for (int g = 0; g < G; g++) {
    sums(result[g], to + size_t(g) * line);
    for (int t = 0; t < 8; t++)
      for (int i = whole; i < d; i++) to[size_t(g) * line + t] += q[size_t(g) * d + i] * read1(keys + offsets[t] + i);
  }
}

// In place; 0 from length to line.
void softmax(float* p, int length, int line, float scale) {
  std::fill(p + length, p + line, -INFINITY);  // which exp16 makes 1e-38
  F16 most16 = load<F16>(p), total = F16{};
  for (int t = 16; t < line; t += 16) most16 = larger(most16, load<F16>(p + t));
  const float most = largest(most16);
  for (int t = 0; t < line; t += 16) {
    F16 e = exp16((load<F16>(p + t) - most) * scale);
    store(p + t, e);
    total += e;
  }
  const float inverse = 1.0f / sum(total);
  for (int t = 0; t < line; t += 16) store(p + t, load<F16>(p + t) * inverse);
  std::fill(p + length, p + line, 0.0f);
}

// The first 16 V numbers of the values, weighted by p [G, line], into out [G, d].
template <int G, int V, class T>
void mix(const float* p, const T* values, const Offsets& at, float* out, int d) {
  F16 acc[G][V] = {};
  for (int t = 0; t < at.length; t++)
#pragma GCC unroll 4
    for (int j = 0; j < V; j++) {
      F16 v = read16(values + at.here[t] + 16 * j);
#pragma GCC unroll 3
      for (int g = 0; g < G; g++) acc[g][j] += p[size_t(g) * at.line + t] * v;
    }
  F16 result[G][V];
  std::memcpy(result, acc, sizeof acc);
  for (int g = 0; g < G; g++) std::memcpy(out + size_t(g) * d, result[g], sizeof result[g]);
}

#if defined(__AVX512BF16__)
// The same with bf16 products: queries and weights are rounded to bf16. Half the instructions.
template <int G>
void scores(const uint16_t* q, const uint16_t* keys, const int64_t* offsets, int d, float* to, int line) {
  F16 acc[G][8] = {};
  for (int i = 0; i < d; i += 32)
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) {
      __m512bh k = load<__m512bh>(keys + offsets[t] + i);
#pragma GCC unroll 3
      for (int g = 0; g < G; g++)
        acc[g][t] = (F16)_mm512_dpbf16_ps((__m512)acc[g][t], load<__m512bh>(q + size_t(g) * d + i), k);
    }
  F16 result[G][8];
  std::memcpy(result, acc, sizeof acc);
  for (int g = 0; g < G; g++) sums(result[g], to + size_t(g) * line);
}

// 64 numbers of two tokens' values at a time, interleaved: the instruction adds pairs.
template <int G>
void mix(const uint16_t* p, const uint16_t* values, const Offsets& at, float* out, int d) {
  F16 acc[G][4] = {};
  for (int t = 0; t < at.length; t += 2) {
    prefetch(values, at.soon + t, 2, 64);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      __m512i a = load<__m512i>(values + at.here[t] + 32 * j), b = load<__m512i>(values + at.here[t + 1] + 32 * j);
      __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 3
      for (int g = 0; g < G; g++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int>(p + size_t(g) * at.line + t));
        acc[g][2 * j] = (F16)_mm512_dpbf16_ps((__m512)acc[g][2 * j], low, pair);
        acc[g][2 * j + 1] = (F16)_mm512_dpbf16_ps((__m512)acc[g][2 * j + 1], high, pair);
      }
    }
  }
  // Interleaving goes by fours: 0-3, 8-11 and so on are in `low`, 4-7, 12-15 and so on in `high`.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 3
  for (int g = 0; g < G; g++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      __m512 low = (__m512)acc[g][2 * j], high = (__m512)acc[g][2 * j + 1];
      float* to = out + size_t(g) * d + 32 * j;
      _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, first, high));
      _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, second, high));
    }
}
#endif

// G queries q [G, d] over a head's tokens, into out [G, d]. p [G, line] and bf16 (G of line or of d) are scratch.
template <int G, class T>
void attend(const float* q, const T* keys, const T* values, const Offsets& at, int d, float* p, uint16_t* bf16, float* out) {
  const float scale = 1.0f / std::sqrt(float(d));
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2) {
    if (d % 64 == 0) {
      to_bf16(q, bf16, G * d);
      for (int t = 0; t < at.line; t += 8) {
        prefetch(keys, at.soon + t, 8, d);
        scores<G>(bf16, keys, at.here + t, d, p + t, at.line);
      }
      for (int g = 0; g < G; g++) softmax(p + size_t(g) * at.line, at.length, at.line, scale);
      to_bf16(p, bf16, G * at.line);
      for (int i = 0; i < d; i += 64) mix<G>(bf16, values + i, at, out + i, d);
      return;
    }
  }
#endif
  for (int t = 0; t < at.line; t += 8) {
    prefetch(keys, at.soon + t, 8, d);
    scores<G>(q, keys, at.here + t, d, p + t, at.line);
  }
  for (int g = 0; g < G; g++) softmax(p + size_t(g) * at.line, at.length, at.line, scale);
  prefetch(values, at.soon, at.length, d);
  int i = 0;
  for (; i + 64 <= d; i += 64) mix<G, 4>(p, values + i, at, out + i, d);
  for (; i + 16 <= d; i += 16) mix<G, 1>(p, values + i, at, out + i, d);
  for (; i < d; i++)
    for (int g = 0; g < G; g++) {
      float& to = out[size_t(g) * d + i] = 0;
      for (int t = 0; t < at.length; t++) to += p[size_t(g) * at.line + t] * read1(values + at.here[t] + i);
    }
}

}  // namespace
