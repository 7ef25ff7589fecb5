// Memory and threads of the decode step.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
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

namespace {

// Aligned memory, in huge pages if available: a step touches every page of the weights once.
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
    size_ = bytes;
  }
  void at_least(size_t bytes) { if (bytes > size_) resize(bytes); }
  template <class T> T* as() const { return static_cast<T*>(p_.get()); }

 private:
  struct Free { void operator()(void* p) const { std::free(p); } };
  std::unique_ptr<void, Free> p_;
  size_t size_ = 0;
};

// Prefetch weights into the second-level cache: hardware prefetchers stop at the end of a page. The distance in bytes
// depends on the rows, since a product of many rows reads slowly.
template <int ROWS> inline void prefetch_ahead(const char* weights) { __builtin_prefetch(weights + (ROWS < 4 ? 2048 : 8192), 0, 2); }

// A thread pool of its own: all threads exist before a step begins, and sleep soon after it.
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
    barrier();  // all threads have left the job
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
      if (spins > 4000) std::this_thread::yield();  // another process may have the core of the thread we wait for
    }
  }

 private:
  void work(int i) {
    for (long seen = 0;;) {
      const std::function<void(int)>* job;
      // Waking up takes as long as a layer, and the next step often follows at once: spin for 1 ms before sleeping.
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
      while (job_number_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until)
        std::this_thread::yield();
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
  std::atomic<long> job_number_{0};
  bool stop_ = false;
  std::atomic<int> arrived_{0}, phase_{0};
};

}  // namespace
