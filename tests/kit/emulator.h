// CUDA's thread blocks on a CPU, to test kernels where there is no device: every thread of a block is a fibre, and a
// barrier runs the others. It has only what the kernels in snapstore/engine/cuda use.

#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __device__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline
#define __noinline__

struct Index { unsigned x = 0, y = 0, z = 0; };
static Index threadIdx, blockIdx;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static unsigned atomicOr(unsigned* address, unsigned value) { return (*address |= value) & ~value; }
static int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
static int __ffs(unsigned value) { return __builtin_ffs(value); }
static int __popc(unsigned value) { return __builtin_popcount(value); }
static void __threadfence() {}
static unsigned atomicAdd(unsigned* address, unsigned value) { return (*address += value) - value; }

template <typename T>
static T atomicMin(T* address, T value) {
    const T before = *address;
    if (value < before) *address = value;
    return before;
}
template <typename T>
static T atomicMax(T* address, T value) {
    const T before = *address;
    if (value > before) *address = value;
    return before;
}

struct Fibre {
    jmp_buf place;  // where it goes on, once it has begun; unlike swapcontext, that takes no system call
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    bool begun = false, done = false;
    uint64_t shuffled = 0;
};
static std::deque<Fibre> fibres;  // used again by later blocks
static jmp_buf scheduler;
static unsigned running;
static const std::function<void()>* body;

static void yield() {
    if (!_setjmp(fibres[running].place)) _longjmp(scheduler, 1);
}

struct Barrier {  // of a block, or of a warp; nobody waits for threads that have ended
    unsigned alive = 0, here = 0;
    unsigned long passed = 0;
    void look() {
        if (alive && here == alive) passed++, here = 0;
    }
    void wait() {
        unsigned long mine = passed + 1;
        here++;
        look();
        while (passed < mine) yield();
    }
    void leave() {
        alive--;
        look();
    }
};
static Barrier of_block, of_warp[32];

static void __syncthreads() { of_block.wait(); }
static void __syncwarp() { of_warp[running / 32].wait(); }
template <typename T>
static T shuffled(T value, unsigned from) {  // the value of another lane, or of this one if there is no such lane
    std::memcpy(&fibres[running].shuffled, &value, sizeof(T));
    of_warp[running / 32].wait();
    T other;
    std::memcpy(&other, &fibres[from / 32 == running / 32 ? from : running].shuffled, sizeof(T));
    of_warp[running / 32].wait();
    return other;
}
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int step) {
    return shuffled(value, running ^ step);
}
template <typename T>
static T __shfl_up_sync(unsigned, T value, unsigned step) {
    return shuffled(value, running - step);
}
template <typename T>
static T __shfl_sync(unsigned, T value, int lane) {
    return shuffled(value, running / 32 * 32 + lane);
}
static unsigned __ballot_sync(unsigned, bool value) {  // of whole warps
    fibres[running].shuffled = value;
    of_warp[running / 32].wait();
    unsigned lanes = 0;
    for (unsigned i = 0; i < 32; i++) lanes |= (unsigned)fibres[running / 32 * 32 + i].shuffled << i;
    of_warp[running / 32].wait();
    return lanes;
}
static void enter() {
    while (true) {  // a thread of one block after another
        (*body)();
        fibres[running].done = true;
        of_block.leave();
        of_warp[running / 32].leave();
        yield();
    }
}
static void resume() {  // the fibre `running`, until it yields
    if (_setjmp(scheduler)) return;
    Fibre& fibre = fibres[running];
    if (fibre.begun) _longjmp(fibre.place, 1);
    fibre.begun = true;
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data();
    fibre.context.uc_stack.ss_size = fibre.stack.size();
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, enter, 0);
    setcontext(&fibre.context);
}

static void launch(unsigned grid_x, unsigned grid_y, unsigned block, const std::function<void()>& kernel) {
    body = &kernel;
    while (fibres.size() < block) fibres.emplace_back();
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++) {
            of_block = {block};
            for (unsigned i = 0; i < block; i++) {
                if (i % 32 == 0) of_warp[i / 32] = {block - i < 32 ? block - i : 32};
                fibres[i].done = false;
            }
            while (of_block.alive)
                for (running = 0; running < block; running++)
                    if (!fibres[running].done) {
                        threadIdx.x = running;
                        resume();
                    }
        }
}
