#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace preflash::cpu {
namespace {

int available_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(CPU_COUNT(&set), 1);
#endif
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{available_processors()};
  return count;
}

// Lives on the caller's stack; helpers touch it only between joining and leaving.
struct Job {
  IndexedFunction function;
  const void* context;
  int count;
  std::atomic<int> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;  // written by whoever sets `failed` first

  void work() {
    for (int i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        function(context, i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  }
};

class ThreadPool {
 public:
  void run(Job& job, int num_helpers) {
    std::lock_guard one_call_at_a_time(calls_);
    {
      std::lock_guard lock(state_);
      start_helpers(num_helpers);
      job_ = &job;
      seats_ = num_helpers;
      ++generation_;
    }
    job_published_.notify_all();
    job.work();
    // Helpers that have not woken up yet find no job and go back to sleep.
    std::unique_lock lock(state_);
    job_ = nullptr;
    helpers_left_.wait(lock, [this] { return joined_ == 0; });
  }

 private:
  // Where the system refuses a thread, the call goes on with those that there are.
  void start_helpers(int wanted) {
    try {
      for (; started_ < wanted; ++started_) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void help() {
    std::unique_lock lock(state_);
    std::uint64_t seen = 0;
    for (;;) {
      job_published_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (job_ == nullptr || seats_ == 0) continue;
      --seats_;
      ++joined_;
      Job& job = *job_;
      lock.unlock();
      job.work();
      lock.lock();
      if (--joined_ == 0) helpers_left_.notify_all();
    }
  }

  std::mutex calls_;
  std::mutex state_;  // guards all below
  std::condition_variable job_published_;
  std::condition_variable helpers_left_;
  Job* job_ = nullptr;
  std::uint64_t generation_ = 0;
  int started_ = 0;
  int seats_ = 0;
  int joined_ = 0;
};

std::atomic<ThreadPool*> current_pool{nullptr};

// Never destroyed: helpers sleep in it until the process ends. A forked child has none of its
// parent's threads, so it drops the pool (whose locks may be held) and starts its own.
ThreadPool& pool() {
#if defined(__unix__) || defined(__APPLE__)
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });
  static_cast<void>(registered);
#endif
  ThreadPool* found = current_pool.load();
  if (found != nullptr) return *found;
  auto* made = new ThreadPool;
  if (current_pool.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

}  // namespace

int num_threads() { return thread_count().load(); }

void set_num_threads(int count) {
  if (count < 1) {
    throw std::invalid_argument("the number of CPU threads must be at least 1, got " +
                                std::to_string(count));
  }
  thread_count().store(count);
}

void parallel_for(int count, IndexedFunction function, const void* context) {
  const int num_helpers = std::min(num_threads(), count) - 1;
  Job job{.function = function, .context = context, .count = count};
  if (num_helpers <= 0) {
    job.work();
  } else {
    pool().run(job, num_helpers);
  }
  if (job.failed) std::rethrow_exception(job.error);
}

}  // namespace preflash::cpu
