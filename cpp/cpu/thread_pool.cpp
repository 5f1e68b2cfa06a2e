#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/interrupt.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace preflash::cpu {
namespace {

// A helper looks for a needier job after so many indices: where jobs outnumber helpers, each has
// its turn.
constexpr int kShiftIndices = 64;

constexpr std::chrono::milliseconds kBetweenQuestions{50};

thread_local StopRequested stop_requested = nullptr;

// Asks the caller of a job now and then whether it should go on.
class Question {
 public:
  bool says_stop() {
    if (stop_requested == nullptr) return false;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < kBetweenQuestions) return false;
    last_ = now;
    return stop_requested();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// Lives on the caller's stack; helpers touch it only between joining and leaving.
struct Job {
  IndexedFunction function;
  const void* context;
  int count;
  int seats;  // helpers that may work on it at once
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;  // written by the thread that sets `failed` first

  // Guarded by the pool's lock.
  int helpers = 0;
  std::uint64_t last_joined = 0;
  std::condition_variable deserted{};

  // Works on the next index; false where none is left.
  bool step() {
    const std::int64_t index = next.fetch_add(1, std::memory_order_relaxed);
    if (index >= count) return false;
    try {
      function(context, static_cast<int>(index));
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
    return true;
  }
  // The caller's own part.
  void work() {
    Question question;
    while (step()) {
      if (!question.says_stop()) continue;
      next.store(count, std::memory_order_relaxed);
      if (!failed.exchange(true)) {
        error = std::make_exception_ptr(std::runtime_error("interrupted before the end"));
      }
    }
  }
  bool wants_help() const {
    return helpers < seats && next.load(std::memory_order_relaxed) < count;
  }
};

class ThreadPool {
 public:
  void run(Job& job) {
    publish(job);
    job.work();
    std::unique_lock lock(state_);
    std::erase(jobs_, &job);
    job.deserted.wait(lock, [&] { return job.helpers == 0; });
  }

 private:
  void publish(Job& job) {
    {
      std::lock_guard lock(state_);
      jobs_.push_back(&job);
      start_helpers(job.seats);
      publications_.fetch_add(1, std::memory_order_relaxed);
    }
    for (int i = 0; i < job.seats; ++i) job_published_.notify_one();
  }

  // Starts as many helpers as the widest job has asked for; jobs that run at once share them. If
  // the system refuses a thread, the call goes on with the threads that it has.
  void start_helpers(int wanted) {
    try {
      for (; started_ < wanted; ++started_) std::thread([this] { help(); }).detach();
    } catch (const std::exception&) {
    }
  }

  // The job with the fewest helpers; among equals, the one that a helper last came to longest ago,
  // so a new one first. Null where none wants help.
  Job* neediest() const {
    Job* found = nullptr;
    for (Job* job : jobs_) {
      if (!job->wants_help()) continue;
      const bool needier =
          found == nullptr || job->helpers < found->helpers ||
          (job->helpers == found->helpers && job->last_joined < found->last_joined);
      if (needier) found = job;
    }
    return found;
  }

  void help() {
    std::unique_lock lock(state_);
    for (;;) {
      Job* job = neediest();
      if (job == nullptr) {
        job_published_.wait(lock);
        continue;
      }
      ++job->helpers;
      job->last_joined = ++joins_;
      const std::uint64_t seen = publications_.load(std::memory_order_relaxed);
      lock.unlock();
      work_a_shift(*job, seen);
      lock.lock();
      if (--job->helpers == 0) job->deserted.notify_one();
    }
  }

  // Works until the job has no index left, another job arrives or the shift is over.
  void work_a_shift(Job& job, std::uint64_t seen) const {
    for (int i = 0; i < kShiftIndices; ++i) {
      if (!job.step() || publications_.load(std::memory_order_relaxed) != seen) return;
    }
  }

  std::atomic<std::uint64_t> publications_{0};  // changed under the lock, read anywhere
  std::mutex state_;                            // guards all below
  std::condition_variable job_published_;
  std::vector<Job*> jobs_;
  int started_ = 0;
  std::uint64_t joins_ = 0;
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

InterruptScope::InterruptScope(StopRequested question)
    : before_(std::exchange(stop_requested, question)) {}

InterruptScope::~InterruptScope() { stop_requested = before_; }

void parallel_for(int count, int num_threads, IndexedFunction function, const void* context) {
  Job job{.function = function,
          .context = context,
          .count = count,
          .seats = std::min(num_threads, count) - 1};
  if (job.seats > 0) {
    pool().run(job);
  } else {
    job.work();
  }
  if (job.failed) std::rethrow_exception(job.error);
}

}  // namespace preflash::cpu
