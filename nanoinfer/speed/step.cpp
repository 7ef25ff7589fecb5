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
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef float F16 __attribute__((vector_size(64)));     // sixteen numbers
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));  // sixteen bf16

constexpr int SLAB = 32;   // outputs a slab: two vectors
constexpr int GROUP = 32;  // int8: numbers along K that share a scale. K is padded to a multiple of it.

int padded(int k) { return (k + GROUP - 1) / GROUP * GROUP; }

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

template <class T> T load(const void* p) { T v; std::memcpy(&v, p, sizeof v); return v; }
template <class T> void store(void* p, T v) { std::memcpy(p, &v, sizeof v); }
F16 all(float x) { return F16{} + x; }

uint16_t to_bf16(float x) {  // to nearest, ties to even
  uint32_t u = load<uint32_t>(&x);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16) | 0x40;  // NaN stays NaN
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
F16 from_bf16(const uint16_t* p) { return (F16)(__builtin_convertvector(load<H16>(p), U16) << 16); }
F16 read16(const uint16_t* p) { return from_bf16(p); }
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

// --- memory -------------------------------------------------------------------------------------------------------

// Aligned, and in huge pages where the system gives them: a weight pass touches every page once.
class Buffer {
 public:
  void resize(size_t bytes) {
    const size_t align = bytes >= (4u << 20) ? (2u << 20) : 64;
    const size_t whole = (std::max<size_t>(bytes, 1) + align - 1) / align * align;
    p_.reset(std::aligned_alloc(align, whole));
    if (!p_) std::abort();
#if defined(__linux__)
    if (align > 64) madvise(p_.get(), whole, MADV_HUGEPAGE);
#endif
    std::memset(p_.get(), 0, whole);
    wanted_ = bytes;
  }
  void at_least(size_t bytes) { if (bytes > wanted_) resize(bytes); }
  template <class T> T* as() const { return static_cast<T*>(p_.get()); }
  size_t wanted() const { return wanted_; }

 private:
  struct Free { void operator()(void* p) const { std::free(p); } };
  std::unique_ptr<void, Free> p_;
  size_t wanted_ = 0;
};

// --- threads ------------------------------------------------------------------------------------------------------

// A team of its own: as many threads as asked for, all of which are there before a step begins, and asleep between steps.
class Team {
 public:
  explicit Team(int n) : n_(std::max(1, n)) {
    for (int i = 1; i < n_; i++) threads_.emplace_back([this, i] { work(i); });
  }
  ~Team() {
    { std::lock_guard<std::mutex> lock(mutex_); stop_ = true; job_number_++; }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }
  int size() const { return n_; }
  void run(const std::function<void(int)>& job) {
    { std::lock_guard<std::mutex> lock(mutex_); job_ = &job; job_number_++; }
    wake_.notify_all();
    job(0);
    barrier();  // nobody is left behind in the job
  }
  void barrier() {
    if (n_ == 1) return;
    int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (spins > 4000) std::this_thread::yield();  // somebody else has the core that we wait for
    }
  }

 private:
  void work(int i) {
    for (long seen = 0;;) {
      const std::function<void(int)>* job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return job_number_ != seen; });
        seen = job_number_;
        if (stop_) return;
        job = job_;
      }
      (*job)(i);
      barrier();
    }
  }
  int n_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* job_ = nullptr;
  long job_number_ = 0;
  bool stop_ = false;
  std::atomic<int> arrived_{0}, phase_{0};
};

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
  int rows, table_width, block_size;
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
      own.in.reserve(rows, widest);
      own.line.at_least(size_t(widest) * 4);
      own.scores.at_least((longest + call.block_size) * 4);
    }
    team_.run([&](int thread) {
      if (shape.kind == FLOAT32) all_layers<FLOAT32>(call, thread);
      else if (shape.kind == BFLOAT16) all_layers<BFLOAT16>(call, thread);
      else all_layers<INT8>(call, thread);
    });
  }

 private:
  struct Own { Input in; Buffer line, scores; };  // a thread's scratch
  Team team_;
  std::vector<Own> own_;
  Buffer x_, qkv_, mixed_, wide_, turn_;  // residual stream, its projections, attention's result, the MLP's middle

  void share(int n, int thread, int& begin, int& end) const {
    begin = int(int64_t(n) * thread / team_.size()), end = int(int64_t(n) * (thread + 1) / team_.size());
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
      share(of[QKV].n_slabs(), thread, begin, end);
      product<KIND>(of[QKV], own.in, rows, begin, end, [&](int r, int s, F16 a, F16 b) {
        store(qkv + size_t(r) * nqkv + s * SLAB, a);
        store(qkv + size_t(r) * nqkv + s * SLAB + 16, b);
      });
      team_.barrier();
      share(rows * shape.n_kv_heads, thread, begin, end);
      for (int item = begin; item < end; item++) attend<T>(call, l, item / shape.n_kv_heads, item % shape.n_kv_heads, own);
      team_.barrier();
      for (int r = 0; r < rows; r++) own.in.put(KIND, r, mixed + size_t(r) * nqp, nqp);
      add_to_stream<KIND>(of[OUT], rows, thread);
      team_.barrier();
      normed<KIND>(norms[2 * l + 1], rows, own);
      share(of[UP].n_slabs(), thread, begin, end);
      product<KIND>(of[UP], own.in, rows, begin, end, [&](int r, int s, F16 a, F16 b) {
        if (shape.gpt2) {
          store(wide + size_t(r) * fp + s * SLAB, gelu(a));
          store(wide + size_t(r) * fp + s * SLAB + 16, gelu(b));
        } else {  // a slab is 16 of the gate and the 16 that they open
          store(wide + size_t(r) * fp + s * 16, silu(a) * b);
        }
      });
      team_.barrier();
      for (int r = 0; r < rows; r++) own.in.put(KIND, r, wide + size_t(r) * fp, fp);
      add_to_stream<KIND>(of[DOWN], rows, thread);
      team_.barrier();
    }
    constexpr Kind HEAD = KIND == INT8 ? BFLOAT16 : KIND;  // what chooses the token is not rounded that far
    normed<HEAD>(norms.back(), rows, own);
    const Linear& head = linears.back();
    share(head.n_slabs(), thread, begin, end);
    product<HEAD>(head, own.in, rows, begin, end, [&](int r, int s, F16 a, F16 b) {
      float* to = call.logits + size_t(r) * shape.vocab + size_t(s) * SLAB;
      float both[SLAB];
      store(both, a), store(both + 16, b);
      std::memcpy(to, both, size_t(std::min(SLAB, shape.vocab - s * SLAB)) * 4);  // the last slab may be cut
    });
  }

  template <Kind KIND>
  void add_to_stream(const Linear& w, int rows, int thread) {
    const int dp = padded(shape.d_model);
    int begin, end;
    share(w.n_slabs(), thread, begin, end);
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
    int begin, end;
    share(call.rows, thread, begin, end);
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
  template <Kind KIND>
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
      own.in.put(KIND, r, line, dp);
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

  // One KV head of one row: turn, write the new key and value, look at all that are there.
  template <class T>
  void attend(const Step& call, int l, int row, int kv, Own& own) {
    const int d = shape.d_head, group = shape.n_heads / shape.n_kv_heads, nq = shape.n_heads * d;
    const int length = int(call.positions[row]) + 1, line = (length + 15) / 16 * 16;
    float* qkv = qkv_.as<float>() + size_t(row) * padded(linears[QKV].n);
    float *q = qkv + kv * group * d, *key = qkv + nq + kv * d, *value = key + shape.n_kv_heads * d;
    if (!shape.gpt2) {
      for (int g = 0; g < group; g++) rotate(q + g * d, row);
      rotate(key, row);
    }
    const int32_t* table = call.tables + size_t(row) * call.table_width;
    const int size = call.block_size, apart = shape.n_kv_heads * d;
    auto block = [&](void* store, int b) {
      return static_cast<T*>(store) + l * call.layer_stride + (int64_t(table[b]) * size * shape.n_kv_heads + kv) * d;
    };
    const int last = (length - 1) / size, slot = (length - 1) % size;
    T *new_key = block(call.k, last) + slot * apart, *new_value = block(call.v, last) + slot * apart;
    for (int i = 0; i < d; i++) write1(new_key + i, key[i]), write1(new_value + i, value[i]);

    float* p = own.scores.as<float>();
    float* out = mixed_.as<float>() + size_t(row) * padded(nq) + kv * group * d;
    const float scale = 1.0f / std::sqrt(float(d));
    for (int g = 0; g < group; g++) {
      for (int b = 0; b <= last; b++) scores(q + g * d, block(call.k, b), std::min(size, length - b * size), d, apart, scale, p + b * size);
      std::fill(p + length, p + line, -INFINITY);
      softmax(p, length, line);
      std::fill(out + g * d, out + (g + 1) * d, 0.0f);
      for (int b = 0; b <= last; b++) mix(p + b * size, block(call.v, b), std::min(size, length - b * size), d, apart, out + g * d);
    }
  }

  // One query against the n keys of a block.
  template <class T>
  static void scores(const float* q, const T* k, int n, int d, int apart, float scale, float* to) {
    for (int t = 0; t < n; t++, k += apart) {
      F16 s = F16{};
      int i = 0;
      for (; i + 16 <= d; i += 16) s += load<F16>(q + i) * read16(k + i);
      float rest = 0;
      for (; i < d; i++) rest += q[i] * read1(k + i);
      to[t] = (sum(s) + rest) * scale;
    }
  }

  // p, of which those from length to line are -infinity, becomes shares of 1.
  static void softmax(float* p, int length, int line) {
    const float most = *std::max_element(p, p + length);
    F16 total = F16{};
    for (int t = 0; t < line; t += 16) {
      F16 e = exp16(load<F16>(p + t) - most);
      for (int j = std::max(0, length - t); j < 16; j++) e[j] = 0;
      store(p + t, e);
      total += e;
    }
    const float inverse = 1.0f / sum(total);
    for (int t = 0; t < line; t += 16) store(p + t, load<F16>(p + t) * inverse);
  }

  // Add the n values of a block, each by its share.
  template <class T>
  static void mix(const float* p, const T* v, int n, int d, int apart, float* out) {
    int i = 0;
    for (; i + 64 <= d; i += 64) mix_part<4>(p, v + i, n, apart, out + i);
    for (; i + 16 <= d; i += 16) mix_part<1>(p, v + i, n, apart, out + i);
    for (; i < d; i++)
      for (int t = 0; t < n; t++) out[i] += p[t] * read1(v + size_t(t) * apart + i);
  }
  template <int V, class T>
  static void mix_part(const float* p, const T* v, int n, int apart, float* out) {
    F16 acc[V];
    std::memcpy(acc, out, sizeof acc);
    for (int t = 0; t < n; t++, v += apart)
#pragma GCC unroll 4
      for (int j = 0; j < V; j++) acc[j] += p[t] * read16(v + 16 * j);
    std::memcpy(out, acc, sizeof acc);
  }
};

}  // namespace

// --- what kernel.py calls -----------------------------------------------------------------------------------------

extern "C" {

void* ni_new(const Shape* shape, float eps) { return new Model(*shape, eps); }
void ni_free(void* model) { delete static_cast<Model*>(model); }

void ni_linear(void* model, int which, const void* slabs, const void* scales, const float* bias, int n, int k) {
  Model& m = *static_cast<Model*>(model);
  m.linears[which].take(which == 4 * m.shape.n_layers && m.shape.kind == INT8 ? BFLOAT16 : Kind(m.shape.kind), slabs, scales, bias, n, k);
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
