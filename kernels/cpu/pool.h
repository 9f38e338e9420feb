// Threads that work together, and how they share their work.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace manta {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// Some tenths of a millisecond: far longer than a piece of work takes.
constexpr int SPINS = 20000;

// How many pieces a thread takes at once: a share of those that are left, so that all threads end together
// (Polychronopoulos and Kuck 1987, guided self-scheduling), but from `least` to `most`.
struct Grain {
    int64_t least, most;
};

// Pieces of work that any thread takes. Nobody waits for a thread that the machine does not run at the moment, unless
// it has a piece: where other programs use the cores as well, those threads that do run go on alone.
class Pieces {
   public:
    // Calls span(first, last, next) until all pieces below count were in one, on whichever thread comes here, and
    // returns when all calls have returned. next: where this thread's following span begins, if that is known by now;
    // otherwise count.
    template <class Span>
    void run(int64_t count, int threads, Grain grain, Span span) {
        const auto take = [&](int64_t& last) {
            int64_t first = next_.load(std::memory_order_relaxed);
            do {
                if (first >= count) return count;
                const int64_t share = (count - first) / (2 * threads);
                last = std::min(first + std::clamp(share, grain.least, grain.most), count);
            } while (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed));
            return first;
        };
        int64_t last = 0, next_last = 0;
        for (int64_t first = take(last); first < count;) {
            // Where few are left, one that was taken ahead would keep another thread from beginning it.
            const int64_t next = count - last > (threads - 1) * grain.least ? take(next_last) : count;
            span(first, last, next);
            done_.fetch_add(last - first, std::memory_order_acq_rel);
            if (next < count)
                first = next, last = next_last;
            else
                first = take(last);
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
            if (spins < SPINS)
                relax();
            else
                std::this_thread::yield();
        }
    }

   private:
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

// What threads do together. It owns all that it reads outside of its pieces: a thread may come when all is done.
class Job {
   public:
    virtual ~Job() = default;
    // Called on each thread that is awake; returns when the whole job is done.
    virtual void work() = 0;
};

// The calling thread and threads - 1 others. The others sleep between jobs, after a short time of looking out for the
// next one.
class Pool {
   public:
    explicit Pool(int threads) : threads_(threads) {}

    // False where the system does not give so many threads.
    bool start() try {
        while (int(workers_.size()) + 1 < threads_) workers_.emplace_back([this] { work(); });
        return true;
    } catch (const std::system_error&) {
        return false;
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
            jobs_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    // Does a job, with the help of whoever is awake.
    void run(const std::shared_ptr<Job>& job) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            jobs_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        job->work();
    }

    int threads() const { return threads_; }

   private:
    void work() {
        int64_t seen = 0;
        while (true) {
            for (int spins = 0; spins < SPINS && jobs_.load(std::memory_order_acquire) == seen; spins++) relax();
            std::shared_ptr<Job> job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return jobs_.load(std::memory_order_acquire) != seen; });
                seen = jobs_.load(std::memory_order_acquire);
                if (ending_) return;
                job = job_;
            }
            job->work();
        }
    }

    const int threads_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<int64_t> jobs_{0};
    std::shared_ptr<Job> job_;
    bool ending_ = false;
};

}  // namespace manta
