// Threads that run a step together, and what they wait on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
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

// Waits for a condition that another thread is about to make true; gives its core away when that takes long, which
// happens where other programs use the cores as well.
template <class Condition>
inline void spin_until(Condition condition) {
    for (int spins = 0; !condition(); spins++) {
        if (spins < 4096)
            relax();
        else
            std::this_thread::yield();
    }
}

// All threads meet here, again and again.
class Barrier {
   public:
    explicit Barrier(int threads) : threads_(threads) {}

    void wait() {
        int generation = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(generation + 1, std::memory_order_release);
        } else {
            spin_until([&] { return generation_.load(std::memory_order_acquire) != generation; });
        }
    }

   private:
    const int threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> generation_{0};
};

// The calling thread and threads - 1 others. The others sleep between runs, after a short time of looking out for the
// next one.
class Pool {
   public:
    explicit Pool(int threads) : barrier(threads), threads_(threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
            runs_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    // Calls job(thread) once on each thread and returns when all have returned.
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            runs_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        job(0);
        barrier.wait();
    }

    int threads() const { return threads_; }

    Barrier barrier;

   private:
    void work(int thread) {
        int seen = 0;
        while (true) {
            for (int spins = 0; spins < 20000 && runs_.load(std::memory_order_acquire) == seen; spins++) relax();
            if (runs_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return runs_.load(std::memory_order_acquire) != seen; });
            }
            seen++;
            if (ending_) return;
            (*job_)(thread);
            barrier.wait();
        }
    }

    const int threads_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<int> runs_{0};
    const std::function<void(int)>* job_ = nullptr;
    bool ending_ = false;
};

}  // namespace manta
