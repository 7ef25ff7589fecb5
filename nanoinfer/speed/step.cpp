// A whole decode step in one call: one new token for each of R rows, over the paged KV cache.
//
// A step of a small model is some five hundred operators, each of which PyTorch has to start. Here they are five
// phases a layer in one parallel region, with a barrier between them:
//
//     norm, q k v | rotate, write, attend | output, add | norm, gate and up | down, add        and the head at the end
//
// Weights lie as slabs of 32 outputs, interleaved along K, so that every product is "weights times one broadcast
// number, added to 32 sums" and no sum ever has to be gathered from the lanes of a register. Each thread owns a fixed
// share of the slabs. Sums run over K in one order whatever the number of rows, so a row's logits do not depend on
// its neighbours: to the bit.
//
// Plain C++17 with the vector types of GCC and Clang; AVX-512's bf16 and int8 products where the compiler's target
// has them. Nothing of PyTorch is included: the caller hands over addresses (see kernel.py).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

constexpr int SLAB = 32;   // outputs a slab: two vectors
constexpr int GROUP = 32;  // int8: numbers along K that share a scale. K is padded to a multiple of it.

int padded(int k) { return (k + GROUP - 1) / GROUP * GROUP; }

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// --- products -----------------------------------------------------------------------------------------------------

// Rows of numbers that go into a product, in the form that the weights ask for.
struct Input {
  Buffer data, scale, offset;  // offset: int8 only, see dot()
  int k = 0;                   // padded

  void reserve(int rows, int k_max) {
    data.at_least(size_t(rows) * k_max * 4);
    scale.at_least(size_t(rows) * (k_max / GROUP) * 4);
    offset.at_least(size_t(rows) * (k_max / GROUP) * 4);
  }
  // x holds `padded` floats, of which those beyond K are 0.
  void put(Kind kind, int row, const float* x, int padded) {
    k = padded;
    if (kind == FLOAT32) {
      std::memcpy(data.as<float>() + size_t(row) * k, x, size_t(k) * 4);
    } else if (kind == BFLOAT16) {
      uint16_t* to = data.as<uint16_t>() + size_t(row) * k;
#if defined(__AVX512BF16__)
      for (int i = 0; i < k; i += 32)
        store(to + i, _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
#else
      for (int i = 0; i < k; i++) to[i] = to_bf16(x[i]);
#endif
    } else {
      int8_t* to = data.as<int8_t>() + size_t(row) * k;
      for (int g = 0; g < k / GROUP; g++) {
        const float* from = x + g * GROUP;
        float most = 0;
        for (int i = 0; i < GROUP; i++) most = std::max(most, std::fabs(from[i]));
        float inverse = most > 0 ? 127.0f / most : 0.0f;
        int32_t total = 0;
        for (int i = 0; i < GROUP; i++) {
          int q = int(from[i] * inverse + (from[i] < 0 ? -0.5f : 0.5f));
          to[g * GROUP + i] = int8_t(q);
          total += q;
        }
        scale.as<float>()[row * (k / GROUP) + g] = most / 127.0f;
        offset.as<int32_t>()[row * (k / GROUP) + g] = -128 * total;
      }
    }
  }
  // Into the row behind it: what int8 left of x. Changes x.
  void put_rest(int row, float* x, int padded) {
    for (int i = 0; i < padded; i++) x[i] -= data.as<int8_t>()[size_t(row) * k + i] * scale.as<float>()[(row * k + i) / GROUP];
    put(INT8, row + 1, x, padded);
  }
};

struct Linear {
  Buffer slabs, scales, bias;
  int n = 0, k = 0;  // k padded
  int n_slabs() const { return (n + SLAB - 1) / SLAB; }

  // Copies what kernel.py has laid out: slabs, the int8 scales (or null), biases (or null).
  void take(Kind kind, const void* from, const void* of, const float* b, int outputs, int inputs) {
    n = outputs, k = padded(inputs);
    const size_t count = size_t(n_slabs()) * SLAB * k;
    slabs.resize(count * (kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1));
    std::memcpy(slabs.as<char>(), from, slabs.wanted());
    if (of) scales.resize(count / GROUP * 2), std::memcpy(scales.as<char>(), of, scales.wanted());
    bias.resize(size_t(n_slabs()) * SLAB * 4);
    if (b) std::memcpy(bias.as<float>(), b, size_t(n) * 4);
  }
};

// Sums of ROWS rows over K for S slabs side by side. Few rows need several slabs to have enough sums under way;
// many rows use up the registers with one. The order of each sum is the same in every shape.
template <Kind KIND, int ROWS, int S>
void dot(const Linear& w, const Input& x, int row, int slab, F16 (&result)[ROWS][S][2]) {
  F16 acc[ROWS][S][2] = {};  // by its own name, so that it stays in registers: nothing else can point to it
  const size_t stride = size_t(SLAB) * w.k;
  if constexpr (KIND == FLOAT32) {
    const float* slabs = w.slabs.as<float>() + slab * stride;
    const float* in = x.data.as<float>() + size_t(row) * x.k;
    for (int i = 0; i < w.k; i++)
#pragma GCC unroll 8
      for (int s = 0; s < S; s++) {
        F16 a = load<F16>(slabs + s * stride + i * SLAB), b = load<F16>(slabs + s * stride + i * SLAB + 16);
        ahead(slabs + s * stride + i * SLAB);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          F16 v = all(in[size_t(r) * x.k + i]);
          acc[r][s][0] += a * v;
          acc[r][s][1] += b * v;
        }
      }
  } else if constexpr (KIND == BFLOAT16) {
    const uint16_t* slabs = w.slabs.as<uint16_t>() + slab * stride;
    const uint32_t* in = x.data.as<uint32_t>() + size_t(row) * x.k / 2;  // pairs along K
    for (int i = 0; i < w.k / 2; i++)
#pragma GCC unroll 8
      for (int s = 0; s < S; s++) {
        U16 a = load<U16>(slabs + s * stride + i * 2 * SLAB), b = load<U16>(slabs + s * stride + i * 2 * SLAB + 32);
        ahead(slabs + s * stride + i * 2 * SLAB);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          uint32_t pair = in[size_t(r) * x.k / 2 + i];
#if defined(__AVX512BF16__)
          __m512bh v = (__m512bh)_mm512_set1_epi32(int(pair));
          acc[r][s][0] = (F16)_mm512_dpbf16_ps((__m512)acc[r][s][0], (__m512bh)a, v);
          acc[r][s][1] = (F16)_mm512_dpbf16_ps((__m512)acc[r][s][1], (__m512bh)b, v);
#else
          uint32_t low = pair << 16, high = pair & 0xffff0000u;
          F16 v0 = all(load<float>(&low)), v1 = all(load<float>(&high));
          acc[r][s][0] += (F16)(a << 16) * v0;
          acc[r][s][0] += (F16)(a & 0xffff0000u) * v1;
          acc[r][s][1] += (F16)(b << 16) * v0;
          acc[r][s][1] += (F16)(b & 0xffff0000u) * v1;
#endif
        }
      }
  } else {
    // Weights are stored with 128 added, since the instruction takes one side unsigned. sum((w + 128) x) is
    // 128 sum(x) too large, and that is what the sums of a group begin with, negated.
    const uint8_t* slabs = w.slabs.as<uint8_t>() + slab * stride;
    const uint16_t* scales = w.scales.as<uint16_t>() + slab * stride / GROUP;
    const int groups = w.k / GROUP;
    for (int g = 0; g < groups; g++) {
      I16 whole[ROWS][S][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        for (int s = 0; s < S; s++)
          whole[r][s][0] = whole[r][s][1] = I16{} + x.offset.as<int32_t>()[size_t(row + r) * groups + g];
      for (int i = g * GROUP / 4; i < (g + 1) * GROUP / 4; i++)
#pragma GCC unroll 8
        for (int s = 0; s < S; s++) {
          U16 a = load<U16>(slabs + s * stride + i * 4 * SLAB), b = load<U16>(slabs + s * stride + i * 4 * SLAB + 64);
          ahead(slabs + s * stride + i * 4 * SLAB);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) {
            const int8_t* four = x.data.as<int8_t>() + size_t(row + r) * x.k + 4 * i;
#if defined(__AVX512VNNI__)
            __m512i v = _mm512_set1_epi32(load<int>(four));
            whole[r][s][0] = (I16)_mm512_dpbusd_epi32((__m512i)whole[r][s][0], (__m512i)a, v);
            whole[r][s][1] = (I16)_mm512_dpbusd_epi32((__m512i)whole[r][s][1], (__m512i)b, v);
#else
            for (int j = 0; j < 4; j++) {
              whole[r][s][0] += (I16)((a >> (8 * j)) & 255u) * int32_t(four[j]);
              whole[r][s][1] += (I16)((b >> (8 * j)) & 255u) * int32_t(four[j]);
            }
#endif
          }
        }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        float scale = x.scale.as<float>()[size_t(row + r) * groups + g];
        for (int s = 0; s < S; s++) {
          const uint16_t* of = scales + s * stride / GROUP + g * SLAB;
          acc[r][s][0] += __builtin_convertvector(whole[r][s][0], F16) * (from_bf16(of) * scale);
          acc[r][s][1] += __builtin_convertvector(whole[r][s][1], F16) * (from_bf16(of + 16) * scale);
        }
      }
    }
  }
  std::memcpy(result, acc, sizeof acc);
}

template <Kind KIND, int ROWS, int S, class Use>
void tile(const Linear& w, const Input& x, int row, int slab, Use&& use) {
  F16 acc[ROWS][S][2];
  dot<KIND, ROWS, S>(w, x, row, slab, acc);
  for (int s = 0; s < S; s++) {
    const float* bias = w.bias.as<float>() + (slab + s) * SLAB;
    for (int r = 0; r < ROWS; r++) use(row + r, slab + s, acc[r][s][0] + load<F16>(bias), acc[r][s][1] + load<F16>(bias + 16));
  }
}

// As many rows as go into tiles of ROWS, against slabs from begin to end; the row behind them.
template <Kind KIND, int ROWS, class Use>
int tiles(const Linear& w, const Input& x, int row, int rows, int begin, int end, Use&& use) {
  constexpr int S = ROWS == 8 ? 1 : ROWS == 4 ? 2 : 4;
  for (; rows - row >= ROWS; row += ROWS) {
    int s = begin;
    for (; s + S <= end; s += S) tile<KIND, ROWS, S>(w, x, row, s, use);
    for (; s < end; s++) tile<KIND, ROWS, 1>(w, x, row, s, use);
  }
  return row;
}

// All rows against slabs begin..end. Four slabs at a time stay in the second-level cache while the rows pass by.
template <Kind KIND, class Use>
void product(const Linear& w, const Input& x, int rows, int begin, int end, Use&& use) {
  for (int slab = begin; slab < end; slab += 4) {
    const int last = std::min(end, slab + 4);
    int row = tiles<KIND, 8>(w, x, 0, rows, slab, last, use);
    row = tiles<KIND, 4>(w, x, row, rows, slab, last, use);
    row = tiles<KIND, 2>(w, x, row, rows, slab, last, use);
    tiles<KIND, 1>(w, x, row, rows, slab, last, use);
  }
}

// --- the model ----------------------------------------------------------------------------------------------------

struct Shape {  // in the order in which kernel.py fills it
  int32_t gpt2, n_layers, d_model, n_heads, n_kv_heads, d_head, d_ff, vocab, kind, kv_bf16, threads;
};
struct Norm { std::vector<float> weight, bias; };
enum Which { QKV = 0, OUT = 1, UP = 2, DOWN = 3 };  // of a layer's four products
struct Step {  // one call's arguments
  int rows, table_width, block_size, together;  // together: some rows are of one text
  const int64_t *ids, *positions;
  const int32_t* tables;  // [rows, table_width]
  void *k, *v;            // [n_layers, n_blocks, block_size, n_kv, d_head]
  int64_t layer_stride;
  float* logits;          // [rows, vocab]
};

class Model {
 public:
  Shape shape;
  float eps;
  std::vector<Linear> linears;  // four a layer, then the head
  std::vector<Norm> norms;      // attention's and the MLP's of each layer, then the last
  std::vector<float> inv_freq;
  const void *embedding = nullptr, *positions = nullptr;  // float or bf16, as the cache; the caller keeps them

  Model(const Shape& s, float e)
      : shape(s), eps(e), linears(4 * s.n_layers + 1), norms(2 * s.n_layers + 1), team_(s.threads), own_(team_.size()) {}

  void step(const Step& call) {
    const int rows = call.rows, widest = padded(std::max({shape.d_model, shape.d_ff, shape.n_heads * shape.d_head}));
    x_.at_least(size_t(rows) * padded(shape.d_model) * 4);
    qkv_.at_least(size_t(rows) * padded(linears[QKV].n) * 4);
    mixed_.at_least(size_t(rows) * padded(shape.n_heads * shape.d_head) * 4);
    wide_.at_least(size_t(rows) * padded(shape.d_ff) * 4);
    turn_.at_least(size_t(rows) * shape.d_head * 4);
    const size_t longest = size_t(*std::max_element(call.positions, call.positions + rows)) + 32;
    for (auto& own : own_) {
      own.in.reserve(rows * 2, widest);
      own.line.at_least(size_t(widest) * 4);
      own.scores.at_least(longest * 3 * 4);
      own.places.at_least(longest * 8);
    }
    team_.run([&](int thread) {
      if (shape.kind == FLOAT32) all_layers<FLOAT32>(call, thread);
      else if (shape.kind == BFLOAT16) all_layers<BFLOAT16>(call, thread);
      else all_layers<INT8>(call, thread);
    });
  }

 private:
  struct Own { Input in; Buffer line, scores, places; };  // a thread's scratch
  Team team_;
  std::vector<Own> own_;
  Buffer x_, qkv_, mixed_, wide_, turn_;  // residual stream, its projections, attention's result, the MLP's middle

  std::pair<int, int> share(int n, int thread) const {
    return {int(int64_t(n) * thread / team_.size()), int(int64_t(n) * (thread + 1) / team_.size())};
  }

  // Ask for the beginnings of a product's first slabs, before the wait at the barrier in front of it.
  void ready(const Linear& w, int thread) const {
    auto [begin, end] = share(w.n_slabs(), thread);
    asm volatile("");
    for (int s = begin; s < std::min(end, begin + 4); s++)
      for (int at = 0; at < AHEAD / 2; at += 64)
        __builtin_prefetch(w.slabs.as<char>() + w.slabs.wanted() / w.n_slabs() * s + at, 0, 2);
  }

  template <Kind KIND>
  void all_layers(const Step& call, int thread) {
    if (shape.kv_bf16) all_layers<KIND, uint16_t>(call, thread);
    else all_layers<KIND, float>(call, thread);
  }

  template <Kind KIND, class T>
  void all_layers(const Step& call, int thread) {
    const int rows = call.rows, nqp = padded(shape.n_heads * shape.d_head), fp = padded(shape.d_ff);
    const int nqkv = padded(linears[QKV].n);
    Own& own = own_[thread];
    float *qkv = qkv_.as<float>(), *mixed = mixed_.as<float>(), *wide = wide_.as<float>();
    int begin, end;
    embed<T>(call, thread);
    team_.barrier();
    for (int l = 0; l < shape.n_layers; l++) {
      const Linear* of = &linears[4 * l];
      normed<KIND>(norms[2 * l], rows, own);
      std::tie(begin, end) = share(of[QKV].n_slabs(), thread);
      product<KIND>(of[QKV], own.in, rows, begin, end, [&](int r, int s, F16 a, F16 b) {
        store(qkv + size_t(r) * nqkv + s * SLAB, a);
        store(qkv + size_t(r) * nqkv + s * SLAB + 16, b);
      });
      std::tie(begin, end) = share(rows * shape.n_kv_heads, thread);
      if (begin < end) fetch<T>(call, l, begin / shape.n_kv_heads, begin % shape.n_kv_heads);
      team_.barrier();
      for (int item = begin; item < end; item++) write<T>(call, l, item / shape.n_kv_heads, item % shape.n_kv_heads);
      if (call.together) team_.barrier();  // rows of one text look at each other's keys
      for (int item = begin; item < end; item++) {
        if (item + 1 < end) fetch<T>(call, l, (item + 1) / shape.n_kv_heads, (item + 1) % shape.n_kv_heads);
        attend<T>(call, l, item / shape.n_kv_heads, item % shape.n_kv_heads, own);
      }
      ready(of[OUT], thread);
      team_.barrier();
      for (int r = 0; r < rows; r++) own.in.put(KIND, r, mixed + size_t(r) * nqp, nqp);
      add_to_stream<KIND>(of[OUT], rows, thread);
      ready(of[UP], thread);
      team_.barrier();
      normed<KIND>(norms[2 * l + 1], rows, own);
      std::tie(begin, end) = share(of[UP].n_slabs(), thread);
      product<KIND>(of[UP], own.in, rows, begin, end, [&](int r, int s, F16 a, F16 b) {
        if (shape.gpt2) {
          store(wide + size_t(r) * fp + s * SLAB, gelu(a));
          store(wide + size_t(r) * fp + s * SLAB + 16, gelu(b));
        } else {  // a slab is 16 of the gate and the 16 that they open
          store(wide + size_t(r) * fp + s * 16, silu(a) * b);
        }
      });
      ready(of[DOWN], thread);
      team_.barrier();
      for (int r = 0; r < rows; r++) own.in.put(KIND, r, wide + size_t(r) * fp, fp);
      add_to_stream<KIND>(of[DOWN], rows, thread);
      ready(of[4], thread);
      team_.barrier();
    }
    // What chooses the token is not rounded that far: in int8 each row is two, itself and what rounding left of it.
    constexpr int PARTS = KIND == INT8 ? 2 : 1;
    normed<KIND, PARTS>(norms.back(), rows, own);
    const Linear& head = linears.back();
    std::tie(begin, end) = share(head.n_slabs(), thread);
    product<KIND>(head, own.in, rows * PARTS, begin, end, [&](int r, int s, F16 a, F16 b) {
      float* to = call.logits + size_t(r / PARTS) * shape.vocab + size_t(s) * SLAB;
      const int n = std::min(SLAB, shape.vocab - s * SLAB);  // the last slab may be cut
      float both[SLAB];
      store(both, a), store(both + 16, b);
      for (int i = 0; i < n; i++) to[i] = r % PARTS ? to[i] + both[i] : both[i];
    });
  }

  template <Kind KIND>
  void add_to_stream(const Linear& w, int rows, int thread) {
    const int dp = padded(shape.d_model);
    auto [begin, end] = share(w.n_slabs(), thread);
    product<KIND>(w, own_[thread].in, rows, begin, end, [&](int r, int s, F16 a, F16 b) {
      float* to = x_.as<float>() + size_t(r) * dp + s * SLAB;
      store(to, load<F16>(to) + a);
      store(to + 16, load<F16>(to + 16) + b);
    });
  }

  // Rows of the residual stream, and the rotations of their positions.
  template <class T>
  void embed(const Step& call, int thread) {
    const int d = shape.d_model, dp = padded(d), half = shape.d_head / 2;
    auto [begin, end] = share(call.rows, thread);
    for (int r = begin; r < end; r++) {
      float* to = x_.as<float>() + size_t(r) * dp;
      const T* token = static_cast<const T*>(embedding) + call.ids[r] * d;
      const T* place = shape.gpt2 ? static_cast<const T*>(positions) + call.positions[r] * d : nullptr;
      for (int i = 0; i < d; i++) to[i] = read1(token + i) + (place ? read1(place + i) : 0.0f);
      for (int i = d; i < dp; i++) to[i] = 0;
      for (int i = 0; !shape.gpt2 && i < half; i++) {
        float angle = float(call.positions[r]) * inv_freq[i];
        turn_.as<float>()[size_t(r) * 2 * half + i] = std::cos(angle);
        turn_.as<float>()[size_t(r) * 2 * half + half + i] = std::sin(angle);
      }
    }
  }

  // Every thread norms all rows for itself: it is less work than a barrier is waiting.
  template <Kind KIND, int PARTS = 1>
  void normed(const Norm& norm, int rows, Own& own) {
    const int d = shape.d_model, dp = padded(d);
    float* line = own.line.as<float>();
    for (int r = 0; r < rows; r++) {
      const float* x = x_.as<float>() + size_t(r) * dp;  // beyond d there are zeros
      F16 total = F16{}, squares = F16{};
      for (int i = 0; i < dp; i += 16) { F16 v = load<F16>(x + i); total += v, squares += v * v; }
      const float mean = shape.gpt2 ? sum(total) / d : 0.0f;
      float spread = sum(squares) / d;
      if (shape.gpt2) {  // around the mean, in a second pass: the difference of two large sums would be rounding
        F16 around = F16{};
        for (int i = 0; i < d; i++) line[i] = (x[i] - mean) * (x[i] - mean);
        std::fill(line + d, line + dp, 0.0f);
        for (int i = 0; i < dp; i += 16) around += load<F16>(line + i);
        spread = sum(around) / d;
      }
      const float scale = 1.0f / std::sqrt(spread + eps);
      for (int i = 0; i < d; i++) line[i] = (x[i] - mean) * scale * norm.weight[i];
      for (int i = 0; i < d && shape.gpt2; i++) line[i] += norm.bias[i];
      std::fill(line + d, line + dp, 0.0f);
      own.in.put(KIND, r * PARTS, line, dp);
      if (PARTS == 2) own.in.put_rest(r * PARTS, line, dp);
    }
  }

  void rotate(float* head, int row) const {
    const int half = shape.d_head / 2;
    const float *cosine = turn_.as<float>() + size_t(row) * 2 * half, *sine = cosine + half;
    for (int i = 0; i < half; i++) {
      float a = head[i], b = head[i + half];
      head[i] = a * cosine[i] - b * sine[i];
      head[i + half] = b * cosine[i] + a * sine[i];
    }
  }

  const float* query(int row, int kv) const {
    return qkv_.as<float>() + size_t(row) * padded(linears[QKV].n) + kv * (shape.n_heads / shape.n_kv_heads) * shape.d_head;
  }
  template <class T>
  static T* stored(void* store, const Step& call, int l) { return static_cast<T*>(store) + l * call.layer_stride; }
  // Where in a layer's store the key of a row's token t begins.
  int64_t place(const Step& call, int row, int kv, int t) const {
    const int64_t block = call.tables[size_t(row) * call.table_width + t / call.block_size];
    return ((block * call.block_size + t % call.block_size) * shape.n_kv_heads + kv) * shape.d_head;
  }

  // Turn one KV head's queries and key of one row by their position, and write key and value into the cache.
  template <class T>
  void write(const Step& call, int l, int row, int kv) {
    const int d = shape.d_head, group = shape.n_heads / shape.n_kv_heads;
    float* q = const_cast<float*>(query(row, kv));
    float *key = qkv_.as<float>() + size_t(row) * padded(linears[QKV].n) + (shape.n_heads + kv) * d, *value = key + shape.n_kv_heads * d;
    for (int g = 0; g < group && !shape.gpt2; g++) rotate(q + g * d, row);
    if (!shape.gpt2) rotate(key, row);
    const int64_t at = place(call, row, kv, int(call.positions[row]));
    T *to_k = stored<T>(call.k, call, l) + at, *to_v = stored<T>(call.v, call, l) + at;
    for (int i = 0; i < d; i++) write1(to_k + i, key[i]), write1(to_v + i, value[i]);
  }

  // Ask for the keys and values that are next: they lie in small pieces, which no processor foresees.
  template <class T>
  void fetch(const Step& call, int l, int row, int kv) const {
    asm volatile("");  // or GCC takes the function for one without effects, and drops it
    const int64_t apart = int64_t(shape.n_kv_heads) * shape.d_head;
    const T *keys = stored<T>(call.k, call, l), *values = stored<T>(call.v, call, l);
    for (int t = 0; t <= call.positions[row]; t += call.block_size) {
      const int64_t first = place(call, row, kv, t);
      for (int i = 0; i < call.block_size; i++)
        for (int at = 0; at < shape.d_head; at += 64 / int(sizeof(T))) {
          __builtin_prefetch(keys + first + i * apart + at, 0, 2);
          __builtin_prefetch(values + first + i * apart + at, 0, 2);
        }
    }
  }

  // One KV head of one row: its queries look at all keys up to the row's own.
  template <class T>
  void attend(const Step& call, int l, int row, int kv, Own& own) {
    const int d = shape.d_head, group = shape.n_heads / shape.n_kv_heads;
    const int length = int(call.positions[row]) + 1, line = (length + 15) / 16 * 16;
    int64_t* places = own.places.as<int64_t>();
    for (int t = 0; t < length; t += call.block_size) {
      const int64_t first = place(call, row, kv, t);
      for (int i = 0; i < call.block_size && t + i < length; i++) places[t + i] = first + int64_t(i) * shape.n_kv_heads * d;
    }
    std::fill(places + length, places + line, places[0]);  // any that are there: their share will be 0
    const T *keys = stored<T>(call.k, call, l), *values = stored<T>(call.v, call, l);
    float *p = own.scores.as<float>(), *out = mixed_.as<float>() + size_t(row) * padded(shape.n_heads * d) + kv * group * d;
    const float* q = query(row, kv);
    for (int g = 0; g < group;) {  // heads that share keys, up to three at a time: each key is read once for them
      auto some = [&](auto n) {
        constexpr int G = decltype(n)::value;
        for (int t = 0; t < line; t += 8) scores<G>(q + g * d, keys, places + t, d, p + t, line);
        for (int h = 0; h < G; h++) softmax(p + size_t(h) * line, length, line, 1.0f / std::sqrt(float(d)));
        int i = 0;
        for (; i + 64 <= d; i += 64) mix<G, 4>(p, values + i, places, length, line, out + g * d + i, d);
        for (; i + 16 <= d; i += 16) mix<G, 1>(p, values + i, places, length, line, out + g * d + i, d);
        for (; i < d; i++)
          for (int h = 0; h < G; h++) {
            float& to = out[(g + h) * d + i] = 0;
            for (int t = 0; t < length; t++) to += p[size_t(h) * line + t] * read1(values + places[t] + i);
          }
        g += G;
      };
      if (group - g >= 3) some(std::integral_constant<int, 3>());
      else if (group - g == 2) some(std::integral_constant<int, 2>());
      else some(std::integral_constant<int, 1>());
    }
  }

  // Products of G queries with eight keys.
  template <int G, class T>
  static void scores(const float* q, const T* keys, const int64_t* places, int d, float* to, int line) {
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

  // p, of which those from length to line count nothing, becomes shares of 1.
  static void softmax(float* p, int length, int line, float scale) {
    std::fill(p + length, p + line, -INFINITY);
    const float most = *std::max_element(p, p + length);
    F16 total = F16{};
    for (int t = 0; t < line; t += 16) {
      F16 e = exp16((load<F16>(p + t) - most) * scale);
      for (int j = std::max(0, length - t); j < 16; j++) e[j] = 0;
      store(p + t, e);
      total += e;
    }
    const float inverse = 1.0f / sum(total);
    for (int t = 0; t < line; t += 16) store(p + t, load<F16>(p + t) * inverse);
  }

  // The values, each by its share, for G queries.
  template <int G, int V, class T>
  static void mix(const float* p, const T* values, const int64_t* places, int length, int line, float* out, int d) {
    F16 acc[G][V] = {};
    for (int t = 0; t < length; t++)
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) {
        F16 v = read16(values + places[t] + 16 * j);
#pragma GCC unroll 3
        for (int g = 0; g < G; g++) acc[g][j] += p[size_t(g) * line + t] * v;
      }
    F16 result[G][V];
    std::memcpy(result, acc, sizeof acc);
    for (int g = 0; g < G; g++) std::memcpy(out + size_t(g) * d, result[g], sizeof result[g]);
  }
};

}  // namespace

// --- what kernel.py calls -----------------------------------------------------------------------------------------

extern "C" {

void* ni_new(const Shape* shape, float eps) { return new Model(*shape, eps); }
void ni_free(void* model) { delete static_cast<Model*>(model); }

void ni_linear(void* model, int which, const void* slabs, const void* scales, const float* bias, int n, int k) {
  Model& m = *static_cast<Model*>(model);
  m.linears[which].take(Kind(m.shape.kind), slabs, scales, bias, n, k);
}

void ni_norm(void* model, int which, const float* weight, const float* bias) {
  Model& m = *static_cast<Model*>(model);
  m.norms[which].weight.assign(weight, weight + m.shape.d_model);
  if (bias) m.norms[which].bias.assign(bias, bias + m.shape.d_model);
}

void ni_embed(void* model, const void* embedding, const void* positions, const float* inv_freq) {
  Model& m = *static_cast<Model*>(model);
  m.embedding = embedding, m.positions = positions;
  if (inv_freq) m.inv_freq.assign(inv_freq, inv_freq + m.shape.d_head / 2);
}

int64_t ni_bytes(void* model) {
  int64_t total = 0;
  for (const Linear& w : static_cast<Model*>(model)->linears) total += int64_t(w.slabs.wanted() + w.scales.wanted());
  return total;
}

void ni_step(void* model, const Step* call) { static_cast<Model*>(model)->step(*call); }
}
