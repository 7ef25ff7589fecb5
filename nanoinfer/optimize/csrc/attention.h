// Attention of a group of queries over the keys and values of the one KV head that they share. Those lie in small
// pieces, wherever the cache had room.
#pragma once

#include "vectors.h"

namespace {

int line_of(int length) { return (length + 15) / 16 * 16; }  // tokens, in whole vectors of scores

// Where a head's keys (and values) begin in their store, token by token; up to `line`, with any that are there.
// `soon` are those of the head that is next, asked for while this one is being computed.
struct Places { const int64_t *here, *soon; int length, line; };

// Ask for n keys or values: no processor foresees them.
template <class T>
void fetch(const T* store, const int64_t* places, int n, int d) {
  for (int t = 0; t < n; t++)
    for (int at = 0; at < d; at += 64 / int(sizeof(T))) __builtin_prefetch(store + places[t] + at, 0, 2);
}

// Products of G queries [G, d] with eight keys, into `to` [G, line].
template <int G, class T>
void scores(const float* q, const T* keys, const int64_t* places, int d, float* to, int line) {
  F16 acc[G][8] = {};
  const int whole = d / 16 * 16;
  for (int i = 0; i < whole; i += 16)
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) {
      F16 k = read16(keys + places[t] + i);
#pragma GCC unroll 3
      for (int g = 0; g < G; g++) acc[g][t] += load<F16>(q + size_t(g) * d + i) * k;
    }
  F16 result[G][8];
  std::memcpy(result, acc, sizeof acc);
  for (int g = 0; g < G; g++) {
    sums(result[g], to + size_t(g) * line);
    for (int t = 0; t < 8; t++)
      for (int i = whole; i < d; i++) to[size_t(g) * line + t] += q[size_t(g) * d + i] * read1(keys + places[t] + i);
  }
}

// p becomes shares of 1, and 0 from length to line.
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

// The values' first 16 V numbers, each by its share p [G, line], into out [G, d].
template <int G, int V, class T>
void mix(const float* p, const T* values, const Places& at, float* out, int d) {
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
// The same where keys and values are bf16 and the processor multiplies such: queries and shares are rounded to it.
// Half the instructions.

template <int G>
void scores(const uint16_t* q, const uint16_t* keys, const int64_t* places, int d, float* to, int line) {
  F16 acc[G][8] = {};
  for (int i = 0; i < d; i += 32)
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) {
      __m512bh k = load<__m512bh>(keys + places[t] + i);
#pragma GCC unroll 3
      for (int g = 0; g < G; g++)
        acc[g][t] = (F16)_mm512_dpbf16_ps((__m512)acc[g][t], load<__m512bh>(q + size_t(g) * d + i), k);
    }
  F16 result[G][8];
  std::memcpy(result, acc, sizeof acc);
  for (int g = 0; g < G; g++) sums(result[g], to + size_t(g) * line);
}

// 64 numbers of two tokens' values at a time: the instruction adds pairs, so the two are laced together.
template <int G>
void mix(const uint16_t* p, const uint16_t* values, const Places& at, float* out, int d) {
  F16 acc[G][4] = {};
  for (int t = 0; t < at.length; t += 2) {
    fetch(values, at.soon + t, 2, 64);
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
  // Lacing goes by fours: 0-3 and 8-11 and so on are in the one, 4-7 and 12-15 in the other.
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

// G queries q [G, d] over a head's tokens, into out [G, d]. p [G, line] and halves (G of line or of d) are scratch.
template <int G, class T>
void attend(const float* q, const T* keys, const T* values, const Places& at, int d, float* p, uint16_t* halves, float* out) {
  const float scale = 1.0f / std::sqrt(float(d));
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2) {
    if (d % 64 == 0) {
      to_bf16(q, halves, G * d);
      for (int t = 0; t < at.line; t += 8) {
        fetch(keys, at.soon + t, 8, d);
        scores<G>(halves, keys, at.here + t, d, p + t, at.line);
      }
      for (int g = 0; g < G; g++) softmax(p + size_t(g) * at.line, at.length, at.line, scale);
      to_bf16(p, halves, G * at.line);
      for (int i = 0; i < d; i += 64) mix<G>(halves, values + i, at, out + i, d);
      return;
    }
  }
#endif
  for (int t = 0; t < at.line; t += 8) {
    fetch(keys, at.soon + t, 8, d);
    scores<G>(q, keys, at.here + t, d, p + t, at.line);
  }
  for (int g = 0; g < G; g++) softmax(p + size_t(g) * at.line, at.length, at.line, scale);
  fetch(values, at.soon, at.length, d);
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
