// A decode step in one call: one new token for each of R rows, over the paged KV cache.
//
// In PyTorch a step of a small model is some five hundred operators. Here it is five phases a layer in one parallel
// region, with a barrier between them, and the head at the end:
//
//     norm, q k v | rotate, write, attend | output, add | norm, gate and up | down, add
//
// Each thread owns a fixed share of the weights (products.h). Sums run in one order whatever the number of rows, so a
// row's logits do not depend on the other rows, bit for bit.
//
// Plain C++17 with the vector types of GCC and Clang, and AVX-512's bf16 and int8 products if the target has them.
// Nothing of PyTorch is included: the caller passes addresses (cpu_kernel.py).

#include <type_traits>
#include <utility>

#include "attention.h"
#include "products.h"

namespace {

struct Shape {  // in the order of cpu_kernel.py
  int32_t gpt2, n_layers, d_model, n_heads, n_kv_heads, d_head, d_ff, vocab, kind, kv_bf16, threads;
};
struct Norm { std::vector<float> weight, bias; };
enum Product { QKV = 0, OUT = 1, UP = 2, DOWN = 3 };  // of a layer
struct Step {  // arguments of a call
  int rows, table_width, block_size, shared_text;  // shared_text: some rows belong to one text
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
  int64_t n_bytes = 0;  // of all weights
  std::vector<Linear> linears;  // four a layer, then the head
  std::vector<Norm> norms;      // two a layer, then the last
  std::vector<float> inv_freq;
  const void *embedding = nullptr, *positions = nullptr;  // in the cache's dtype; the caller owns them

  Model(const Shape& s, float e)
      : shape(s), eps(e), linears(4 * s.n_layers + 1), norms(2 * s.n_layers + 1), team_(s.threads), scratch_(team_.size()), streams_(team_.size()) {
    const int q = s.n_heads * s.d_head, kv = s.n_kv_heads * s.d_head;
    const int sizes[4][2] = {{q + 2 * kv, s.d_model}, {s.d_model, q}, {s.d_ff * (s.gpt2 ? 1 : 2), s.d_model}, {s.d_model, s.d_ff}};
    for (size_t i = 0; i < linears.size(); i++) {
      const bool head = i + 1 == linears.size();
      linears[i].n = head ? s.vocab : sizes[i % 4][0], linears[i].k = padded(head ? s.d_model : sizes[i % 4][1]);
    }
    for (int thread = 0; thread < team_.size(); thread++) {
      auto bytes = [&](const Linear& w) {
        auto [begin, end] = share(w.n_slabs(), thread);
        return (end - begin) * w.slab_bytes(Kind(s.kind));
      };
      size_t total = 0;
      for (const Linear& w : linears) total += bytes(w);
      streams_[thread].resize(total);
      n_bytes += int64_t(total);
      char* at = streams_[thread].as<char>();
      for (Linear& w : linears) {
        auto [begin, end] = share(w.n_slabs(), thread);
        w.shares.push_back({begin, end, at});
        at += bytes(w);
      }
    }
  }

  void step(const Step& call) {
    const int rows = call.rows, widest = padded(std::max({shape.d_model, shape.d_ff, shape.n_heads * shape.d_head}));
    x_.at_least(size_t(rows) * padded(shape.d_model) * 4);
    qkv_.at_least(size_t(rows) * padded(linears[QKV].n) * 4);
    mixed_.at_least(size_t(rows) * padded(shape.n_heads * shape.d_head) * 4);
    wide_.at_least(size_t(rows) * padded(shape.d_ff) * 4);
    turn_.at_least(size_t(rows) * shape.d_head * 4);
    const size_t longest = size_t(*std::max_element(call.positions, call.positions + rows)) + 32;
    for (auto& scratch : scratch_) {
      scratch.in.reserve(rows * 2, widest);
      scratch.line.at_least(size_t(widest) * 4);
      scratch.scores.at_least(longest * 3 * 4);
      scratch.offsets.at_least(longest * 8 * 2);
      scratch.here = scratch.offsets.as<int64_t>(), scratch.soon = scratch.here + longest;
      scratch.bf16.at_least(std::max<size_t>(longest, shape.d_head) * 3 * 2);
    }
    team_.run([&](int thread) {
      if (shape.kind == FLOAT32) all_layers<FLOAT32>(call, thread);
      else if (shape.kind == BFLOAT16) all_layers<BFLOAT16>(call, thread);
      else all_layers<INT8>(call, thread);
    });
  }

 private:
  struct Scratch {  // of a thread
    Input in;
    Buffer line, scores, bf16, offsets;
    int64_t *here = nullptr, *soon = nullptr;  // in offsets
  };
  Team team_;
  std::vector<Scratch> scratch_;
  std::vector<Buffer> streams_;  // the threads' weights
  Buffer x_, qkv_, mixed_, wide_, turn_;  // residual stream, q k v, attention's result, the MLP's activations, RoPE

  std::pair<int, int> share(int n, int thread) const {
    return {int(int64_t(n) * thread / team_.size()), int(int64_t(n) * (thread + 1) / team_.size())};
  }

  // The first of a thread's (row, KV head) pairs, which are divided by the number of tokens they attend to.
  int first_head(const Step& call, int thread) const {
    auto work = [&](int row) { return (call.positions[row] + 32) * shape.n_kv_heads; };  // 32: overhead of a row
    int64_t before = 0;
    for (int r = 0; r < call.rows; r++) before += work(r);
    before = before * thread / team_.size();
    int r = 0;
    for (; r < call.rows && before >= work(r); r++) before -= work(r);
    return r * shape.n_kv_heads + (r < call.rows ? int((before * shape.n_kv_heads + work(r) / 2) / work(r)) : 0);
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
    Scratch& scratch = scratch_[thread];
    float *qkv = qkv_.as<float>(), *mixed = mixed_.as<float>(), *wide = wide_.as<float>();
    const int begin = first_head(call, thread), end = first_head(call, thread + 1);  // of the (row, KV head) pairs
    embed<T>(call, thread);
    team_.barrier();
    for (int l = 0; l < shape.n_layers; l++) {
      const Linear* of = &linears[4 * l];
      normed<KIND>(norms[2 * l], rows, scratch);
      product<KIND>(of[QKV], scratch.in, rows, thread, [&](int r, int s, F16 a, F16 b) {
        store(qkv + size_t(r) * nqkv + s * SLAB, a);
        store(qkv + size_t(r) * nqkv + s * SLAB + 16, b);
      });
      if (begin < end) prefetch_first<T>(call, l, begin / shape.n_kv_heads, begin % shape.n_kv_heads, scratch);
      team_.barrier();
      for (int item = begin; item < end; item++) write<T>(call, l, item / shape.n_kv_heads, item % shape.n_kv_heads);
      if (call.shared_text) team_.barrier();  // rows of one text attend to each other's keys
      for (int item = begin; item < end; item++) {
        const int next = std::min(item + 1, end - 1);
        look_up(call, next / shape.n_kv_heads, next % shape.n_kv_heads, scratch.soon);
        attend_all<T>(call, l, item / shape.n_kv_heads, item % shape.n_kv_heads, scratch);
        std::swap(scratch.here, scratch.soon);
      }
      team_.barrier();
      for (int r = 0; r < rows; r++) scratch.in.put(KIND, r, mixed + size_t(r) * nqp, nqp);
      add_to_stream<KIND>(of[OUT], rows, thread);
      team_.barrier();
      normed<KIND>(norms[2 * l + 1], rows, scratch);
      product<KIND>(of[UP], scratch.in, rows, thread, [&](int r, int s, F16 a, F16 b) {
        if (shape.gpt2) {
          store(wide + size_t(r) * fp + s * SLAB, gelu(a));
          store(wide + size_t(r) * fp + s * SLAB + 16, gelu(b));
        } else {  // a slab is 16 outputs of the gate and 16 of up
          store(wide + size_t(r) * fp + s * 16, silu(a) * b);
        }
      });
      team_.barrier();
      for (int r = 0; r < rows; r++) scratch.in.put(KIND, r, wide + size_t(r) * fp, fp);
      add_to_stream<KIND>(of[DOWN], rows, thread);
      team_.barrier();
    }
    // The head gets 16 bits: in int8 each row is two, the rounded one and its rounding error.
    constexpr int PARTS = KIND == INT8 ? 2 : 1;
    normed<KIND, PARTS>(norms.back(), rows, scratch);
    const Linear& head = linears.back();
    product<KIND>(head, scratch.in, rows * PARTS, thread, [&](int r, int s, F16 a, F16 b) {
      float* to = call.logits + size_t(r / PARTS) * shape.vocab + size_t(s) * SLAB;
      const int n = std::min(SLAB, shape.vocab - s * SLAB);  // the last slab may be partial
      float both[SLAB];
      store(both, a), store(both + 16, b);
      for (int i = 0; i < n; i++) to[i] = r % PARTS ? to[i] + both[i] : both[i];
    });
  }

  template <Kind KIND>
  void add_to_stream(const Linear& w, int rows, int thread) {
    const int dp = padded(shape.d_model);
    product<KIND>(w, scratch_[thread].in, rows, thread, [&](int r, int s, F16 a, F16 b) {
      float* to = x_.as<float>() + size_t(r) * dp + s * SLAB;
      store(to, load<F16>(to) + a);
      store(to + 16, load<F16>(to + 16) + b);
    });
  }

  // Token (and position) embeddings into the residual stream, and RoPE's cosines and sines of the positions.
  template <class T>
  void embed(const Step& call, int thread) {
    const int d = shape.d_model, dp = padded(d), half = shape.d_head / 2;
    auto [begin, end] = share(call.rows, thread);
    for (int r = begin; r < end; r++) {
      float* to = x_.as<float>() + size_t(r) * dp;
      const T* token = static_cast<const T*>(embedding) + call.ids[r] * d;
      const T* position = shape.gpt2 ? static_cast<const T*>(positions) + call.positions[r] * d : nullptr;
      for (int i = 0; i < d; i++) to[i] = read1(token + i) + (position ? read1(position + i) : 0.0f);
      for (int i = d; i < dp; i++) to[i] = 0;
      for (int i = 0; !shape.gpt2 && i < half; i++) {
        float angle = float(call.positions[r]) * inv_freq[i];
        turn_.as<float>()[size_t(r) * 2 * half + i] = std::cos(angle);
        turn_.as<float>()[size_t(r) * 2 * half + half + i] = std::sin(angle);
      }
    }
  }

  // Every thread norms all rows: that takes less time than a barrier.
  template <Kind KIND, int PARTS = 1>
  void normed(const Norm& norm, int rows, Scratch& scratch) {
    const int d = shape.d_model, dp = padded(d);
    float* line = scratch.line.as<float>();
    for (int r = 0; r < rows; r++) {
      const float* x = x_.as<float>() + size_t(r) * dp;  // zeros beyond d
      F16 total = F16{}, squares = F16{};
      for (int i = 0; i < dp; i += 16) { F16 v = load<F16>(x + i); total += v, squares += v * v; }
      const float mean = shape.gpt2 ? sum(total) / d : 0.0f;
      float spread = sum(squares) / d;
      if (shape.gpt2) {  // in a second pass: E[x^2] - E[x]^2 would cancel
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
      scratch.in.put(KIND, r * PARTS, line, dp);
      if (PARTS == 2) scratch.in.put_rest(r * PARTS, line, dp);
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
  // Offset in a layer's store of the key of a row's token t.
  int64_t offset(const Step& call, int row, int kv, int t) const {
    const int64_t block = call.tables[size_t(row) * call.table_width + t / call.block_size];
    return ((block * call.block_size + t % call.block_size) * shape.n_kv_heads + kv) * shape.d_head;
  }

  // Rotate the queries and the key of one row's KV head, and write key and value into the cache.
  template <class T>
  void write(const Step& call, int l, int row, int kv) {
    const int d = shape.d_head, group = shape.n_heads / shape.n_kv_heads;
    float* q = const_cast<float*>(query(row, kv));
    float *key = qkv_.as<float>() + size_t(row) * padded(linears[QKV].n) + (shape.n_heads + kv) * d, *value = key + shape.n_kv_heads * d;
    for (int g = 0; g < group && !shape.gpt2; g++) rotate(q + g * d, row);
    if (!shape.gpt2) rotate(key, row);
    const int64_t at = offset(call, row, kv, int(call.positions[row]));
    T *to_k = stored<T>(call.k, call, l) + at, *to_v = stored<T>(call.v, call, l) + at;
    for (int i = 0; i < d; i++) write1(to_k + i, key[i]), write1(to_v + i, value[i]);
  }

  // The offsets of a row's keys (and values) of one KV head, see Offsets.
  void look_up(const Step& call, int row, int kv, int64_t* offsets) const {
    const int length = int(call.positions[row]) + 1, apart = shape.n_kv_heads * shape.d_head;
    for (int t = 0; t < length; t += call.block_size) {
      const int64_t first = offset(call, row, kv, t);
      for (int i = 0; i < call.block_size && t + i < length; i++) offsets[t + i] = first + int64_t(i) * apart;
    }
    std::fill(offsets + length, offsets + line_of(length), offsets[0]);
  }

  // Prefetch a thread's first keys and values before the barrier that precedes their use.
  template <class T>
  void prefetch_first(const Step& call, int l, int row, int kv, Scratch& scratch) const {
    look_up(call, row, kv, scratch.here);
    asm volatile("");  // else GCC drops this function as one without effects
    for (void* all : {call.k, call.v}) prefetch(stored<T>(all, call, l), scratch.here, int(call.positions[row]) + 1, shape.d_head);
  }

  // All query heads of one row's KV head, up to three at a time, so that each key is read once for three.
  template <class T>
  void attend_all(const Step& call, int l, int row, int kv, Scratch& scratch) {
    const int d = shape.d_head, group = shape.n_heads / shape.n_kv_heads, length = int(call.positions[row]) + 1;
    const Offsets at{scratch.here, scratch.soon, length, line_of(length)};
    const T *keys = stored<T>(call.k, call, l), *values = stored<T>(call.v, call, l);
    const float* q = query(row, kv);
    float* out = mixed_.as<float>() + size_t(row) * padded(shape.n_heads * d) + kv * group * d;
    auto some = [&](auto n, int g) {
      attend<decltype(n)::value>(q + g * d, keys, values, at, d, scratch.scores.as<float>(), scratch.bf16.as<uint16_t>(), out + g * d);
    };
    int g = 0;
    for (; g + 3 <= group; g += 3) some(std::integral_constant<int, 3>(), g);
    if (g + 2 == group) some(std::integral_constant<int, 2>(), g);
    else if (g + 1 == group) some(std::integral_constant<int, 1>(), g);
  }
};

}  // namespace

// --- called by cpu_kernel.py

extern "C" {

void* ni_new(const Shape* shape, float eps) { return new Model(*shape, eps); }
void ni_free(void* model) { delete static_cast<Model*>(model); }

void ni_linear(void* model, int index, const char* slabs, const float* bias) {
  Model& m = *static_cast<Model*>(model);
  m.linears[index].take(Kind(m.shape.kind), slabs, bias);
}

void ni_norm(void* model, int index, const float* weight, const float* bias) {
  Model& m = *static_cast<Model*>(model);
  m.norms[index].weight.assign(weight, weight + m.shape.d_model);
  if (bias) m.norms[index].bias.assign(bias, bias + m.shape.d_model);
}

void ni_embed(void* model, const void* embedding, const void* positions, const float* inv_freq) {
  Model& m = *static_cast<Model*>(model);
  m.embedding = embedding, m.positions = positions;
  if (inv_freq) m.inv_freq.assign(inv_freq, inv_freq + m.shape.d_head / 2);
}

int64_t ni_bytes(void* model) { return static_cast<Model*>(model)->n_bytes; }
void ni_step(void* model, const Step* call) { static_cast<Model*>(model)->step(*call); }
}
