// Vectors of sixteen numbers: the types of GCC and Clang, and operations that they lack.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef float F16 __attribute__((vector_size(64)));     // sixteen numbers
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef int8_t C16 __attribute__((vector_size(16)));    // sixteen int8
typedef uint16_t H16 __attribute__((vector_size(32)));  // sixteen bf16

template <class T> T load(const void* p) { T v; std::memcpy(&v, p, sizeof v); return v; }
template <class T> void store(void* p, T v) { std::memcpy(p, &v, sizeof v); }
F16 all(float x) { return F16{} + x; }

uint16_t to_bf16(float x) {  // to nearest, ties to even
  uint32_t u = load<uint32_t>(&x);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16) | 0x40;  // NaN stays NaN
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
void to_bf16(const float* from, uint16_t* to, int n) {  // n a multiple of 16
#if defined(__AVX512BF16__)
  for (int i = 0; i < n; i += 16) store(to + i, _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
#else
  for (int i = 0; i < n; i++) to[i] = to_bf16(from[i]);
#endif
}
F16 read16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (F16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  return (F16)(__builtin_convertvector(load<H16>(p), U16) << 16);
#endif
}
F16 read16(const float* p) { return load<F16>(p); }
float read1(const uint16_t* p) { uint32_t u = uint32_t(*p) << 16; return load<float>(&u); }
float read1(const float* p) { return *p; }
void write1(uint16_t* p, float x) { *p = to_bf16(x); }
void write1(float* p, float x) { *p = x; }

float sum(F16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lane[16];
  store(lane, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
#endif
}

// The sum of each of eight vectors.
void sums(const F16 (&v)[8], float* to) {
#if defined(__AVX512F__)  // a tree of transposing additions: 24 operations instead of 56
  __m512 a[4], b[2];
  for (int i = 0; i < 4; i++)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]), _mm512_unpackhi_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]));
  for (int i = 0; i < 2; i++) {
    __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  c = _mm512_add_ps(c, _mm512_shuffle_f32x4(c, c, 0xb1));
  _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_shuffle_f32x4(c, c, 0x88)));
#else
  for (int i = 0; i < 8; i++) to[i] = sum(v[i]);
#endif
}

F16 larger(F16 a, F16 b) { return a > b ? a : b; }
F16 magnitude(F16 x) { return (F16)((U16)x & 0x7fffffffu); }
I16 nearest(F16 x) { return __builtin_convertvector(x + (F16)(((U16)x & 0x80000000u) | 0x3f000000u), I16); }
float largest(F16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lane[16];
  store(lane, v);
  return *std::max_element(lane, lane + 16);
#endif
}
int32_t total(I16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t lane[16], all = 0;
  store(lane, v);
  for (int32_t x : lane) all += x;
  return all;
#endif
}

F16 exp16(F16 x) {  // relative error about 1e-7
  x = x < all(-87.0f) ? all(-87.0f) : x;
  x = x > all(88.0f) ? all(88.0f) : x;
  F16 n = x * 1.44269504f + 12582912.0f - 12582912.0f;  // to the nearest whole number
  F16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  F16 p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + c;
  p = p * r * r + r + 1.0f;
  I16 power = (__builtin_convertvector(n, I16) + 127) << 23;
  return p * (F16)power;
}
F16 silu(F16 x) { return x / (1.0f + exp16(-x)); }
F16 gelu(F16 x) { return x / (1.0f + exp16(-1.5957691216f * (x + 0.044715f * x * x * x))); }  // GPT-2's tanh form

}  // namespace
