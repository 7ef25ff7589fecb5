// A whole decode step in one call: one new token for each of R rows, over the paged KV cache.
//
// A step of a small model is some five hundred operators, each of which PyTorch has to start. Here they are five
// phases a layer in one parallel region, with a barrier between them:
//
//     norm, q k v | rotate, write, attend | output, add | norm, gate and up | down, add        and the head at the end
//
// Each thread owns a fixed share of the weights (products.h). Sums run in one order whatever the number of rows, so a
// row's logits do not depend on its neighbours: to the bit.
//
// Plain C++17 with the vector types of GCC and Clang; AVX-512's bf16 and int8 products where the compiler's target
// has them. Nothing of PyTorch is included: the caller hands over addresses (see kernel.py).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "products.h"
#include "team.h"
#include "vectors.h"

namespace {

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
      : shape(s), eps(e), linears(4 * s.n_layers + 1), norms(2 * s.n_layers + 1), team_(s.threads), own_(team_.size()), streams_(team_.size()) {
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
      char* at = streams_[thread].as<char>();
      for (Linear& w : linears) {
        auto [begin, end] = share(w.n_slabs(), thread);
        w.shares.push_back({begin, end, at});
        at += bytes(w);
      }
    }
  }

  int64_t bytes() const {
    int64_t total = 0;
    for (const Buffer& b : streams_) total += int64_t(b.wanted());
    return total;
  }

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
      own.places.at_least(longest * 8 * 2);
      own.here = own.places.as<int64_t>(), own.soon = own.here + longest;
      own.halves.at_least(std::max<size_t>(longest, shape.d_head) * 3 * 2);
    }
    team_.run([&](int thread) {
      if (shape.kind == FLOAT32) all_layers<FLOAT32>(call, thread);
      else if (shape.kind == BFLOAT16) all_layers<BFLOAT16>(call, thread);
      else all_layers<INT8>(call, thread);
    });
  }

 private:
  struct Own {  // a thread's scratch
    Input in;
    Buffer line, scores, halves, places;
    int64_t *here = nullptr, *soon = nullptr;  // in places
  };
  Team team_;
  std::vector<Own> own_;
  std::vector<Buffer> streams_;  // the threads' weights
  Buffer x_, qkv_, mixed_, wide_, turn_;  // residual stream, its projections, attention's result, the MLP's middle

  std::pair<int, int> share(int n, int thread) const {
    return {int(int64_t(n) * thread / team_.size()), int(int64_t(n) * (thread + 1) / team_.size())};
  }

  // The first of a thread's KV heads, counted through the rows. They are shared out by the tokens that they look at.
  int first_head(const Step& call, int thread) const {
    auto work = [&](int row) { return (call.positions[row] + 32) * shape.n_kv_heads; };  // writing and starting count too
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
    Own& own = own_[thread];
    float *qkv = qkv_.as<float>(), *mixed = mixed_.as<float>(), *wide = wide_.as<float>();
    const int begin = first_head(call, thread), end = first_head(call, thread + 1);  // to attend, of all rows' KV heads
    embed<T>(call, thread);
    team_.barrier();
    for (int l = 0; l < shape.n_layers; l++) {
      const Linear* of = &linears[4 * l];
      normed<KIND>(norms[2 * l], rows, own);
      product<KIND>(of[QKV], own.in, rows, thread, [&](int r, int s, F16 a, F16 b) {
        store(qkv + size_t(r) * nqkv + s * SLAB, a);
        store(qkv + size_t(r) * nqkv + s * SLAB + 16, b);
      });
      if (begin < end) ask_first<T>(call, l, begin / shape.n_kv_heads, begin % shape.n_kv_heads, own);
      team_.barrier();
      for (int item = begin; item < end; item++) write<T>(call, l, item / shape.n_kv_heads, item % shape.n_kv_heads);
      if (call.together) team_.barrier();  // rows of one text look at each other's keys
      for (int item = begin; item < end; item++) {
        const int next = std::min(item + 1, end - 1);
        look_up(call, next / shape.n_kv_heads, next % shape.n_kv_heads, own.soon);
        attend_all<T>(call, l, item / shape.n_kv_heads, item % shape.n_kv_heads, own);
        std::swap(own.here, own.soon);
      }
      team_.barrier();
      for (int r = 0; r < rows; r++) own.in.put(KIND, r, mixed + size_t(r) * nqp, nqp);
      add_to_stream<KIND>(of[OUT], rows, thread);
      team_.barrier();
      normed<KIND>(norms[2 * l + 1], rows, own);
      product<KIND>(of[UP], own.in, rows, thread, [&](int r, int s, F16 a, F16 b) {
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
    // What chooses the token is not rounded that far: in int8 each row is two, itself and what rounding left of it.
    constexpr int PARTS = KIND == INT8 ? 2 : 1;
    normed<KIND, PARTS>(norms.back(), rows, own);
    const Linear& head = linears.back();
    product<KIND>(head, own.in, rows * PARTS, thread, [&](int r, int s, F16 a, F16 b) {
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
    product<KIND>(w, own_[thread].in, rows, thread, [&](int r, int s, F16 a, F16 b) {
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

  // Where the keys of one of a row's KV heads begin, see Places.
  void look_up(const Step& call, int row, int kv, int64_t* places) const {
    const int length = int(call.positions[row]) + 1, apart = shape.n_kv_heads * shape.d_head;
    for (int t = 0; t < length; t += call.block_size) {
      const int64_t first = place(call, row, kv, t);
      for (int i = 0; i < call.block_size && t + i < length; i++) places[t + i] = first + int64_t(i) * apart;
    }
    std::fill(places + length, places + line_of(length), places[0]);
  }

  // Look up a thread's first keys and values, and ask for them, before the wait at the barrier in front of their use.
  template <class T>
  void ask_first(const Step& call, int l, int row, int kv, Own& own) const {
    look_up(call, row, kv, own.here);
    asm volatile("");  // or GCC takes this for a function without effects, and drops it
    for (void* all : {call.k, call.v}) fetch(stored<T>(all, call, l), own.here, int(call.positions[row]) + 1, shape.d_head);
  }

  // Every query head of one KV head of one row. Heads that share keys go up to three at a time: each key is read once.
  template <class T>
  void attend_all(const Step& call, int l, int row, int kv, Own& own) {
    const int d = shape.d_head, group = shape.n_heads / shape.n_kv_heads, length = int(call.positions[row]) + 1;
    const Places at{own.here, own.soon, length, line_of(length)};
    const T *keys = stored<T>(call.k, call, l), *values = stored<T>(call.v, call, l);
    const float* q = query(row, kv);
    float* out = mixed_.as<float>() + size_t(row) * padded(shape.n_heads * d) + kv * group * d;
    auto some = [&](auto n, int g) {
      attend<decltype(n)::value>(q + g * d, keys, values, at, d, own.scores.as<float>(), own.halves.as<uint16_t>(), out + g * d);
    };
    int g = 0;
    for (; g + 3 <= group; g += 3) some(std::integral_constant<int, 3>(), g);
    if (g + 2 == group) some(std::integral_constant<int, 2>(), g);
    else if (g + 1 == group) some(std::integral_constant<int, 1>(), g);
  }
};

}  // namespace

// --- what kernel.py calls -----------------------------------------------------------------------------------------

extern "C" {

void* ni_new(const Shape* shape, float eps) { return new Model(*shape, eps); }
void ni_free(void* model) { delete static_cast<Model*>(model); }

void ni_linear(void* model, int which, const char* slabs, const float* bias) {
  Model& m = *static_cast<Model*>(model);
  m.linears[which].take(Kind(m.shape.kind), slabs, bias);
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

int64_t ni_bytes(void* model) { return static_cast<Model*>(model)->bytes(); }
void ni_step(void* model, const Step* call) { static_cast<Model*>(model)->step(*call); }
}
