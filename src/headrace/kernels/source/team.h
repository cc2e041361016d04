// Threads that go through a computation together and meet at barriers.
//
// A barrier spins for some microseconds and then gives its core away. A step has hundreds of them: where other
// processes want the cores too, threads that only spin would wait for one another a whole time slice each time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif
#include <sched.h>

constexpr int SPINS = 2000;

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Team {
    int size = 1;
    std::atomic<int> arrived{0}, phase{0};
    std::atomic<int64_t> next{0};  // the next task that is free, since the last barrier
};

// One thread of a team.
struct Member {
    Team& team;
    int rank;

    void barrier() {
        if (team.size == 1) {
            team.next = 0;
            return;
        }
        const int phase = team.phase.load(std::memory_order_acquire);
        if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == team.size) {
            team.arrived.store(0, std::memory_order_relaxed);
            team.next.store(0, std::memory_order_relaxed);
            team.phase.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; team.phase.load(std::memory_order_acquire) == phase; spins++) {
            if (spins < SPINS)
                relax();
            else
                sched_yield();
        }
    }

    // This thread's part of `count` items, the same for the same number of threads. Few items are not divided.
    void share(int64_t count, int64_t least, int64_t* first, int64_t* last) const {
        const int64_t size = count < least ? 1 : team.size;
        *first = rank < size ? count * rank / size : count;
        *last = rank < size ? count * (rank + 1) / size : count;
    }

    // The next of `count` tasks that no thread has taken since the last barrier, or -1.
    int64_t take(int64_t count) const {
        const int64_t task = team.next.fetch_add(1, std::memory_order_relaxed);
        return task < count ? task : -1;
    }
};

// Runs work(member) on `threads` threads.
template <typename Work>
static inline void together(int threads, Work work) {
    Team team;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        team.size = omp_get_num_threads();
        Member member = {team, omp_get_thread_num()};
        work(member);
    }
#else
    (void)threads;
    Member member = {team, 0};
    work(member);
#endif
}
