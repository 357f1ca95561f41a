// CUDA's thread blocks on a CPU, for testing kernels where there is no device: every thread of a block is a fibre, and
// a barrier runs the others. Just what the kernels in snapstore/cuda use.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline

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
static void __threadfence() {}
static unsigned atomicAdd(unsigned* address, unsigned value) { return (*address += value) - value; }

struct Fibre {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    bool done = false;
    unsigned long waits[2] = {0, 0};  // barriers it has come to: of the block, of its warp
    uint64_t shuffled = 0;
};
static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static unsigned running;
static const std::function<void()>* body;

static void yield() { swapcontext(&fibres[running].context, &scheduler); }
static void barrier(int kind, unsigned first, unsigned count) {  // of the threads first to first + count
    unsigned long mine = ++fibres[running].waits[kind];
    auto behind = [&] {
        for (unsigned i = first; i < first + count && i < fibres.size(); i++)
            if (!fibres[i].done && fibres[i].waits[kind] < mine) return true;
        return false;
    };
    while (behind()) yield();
}
static void __syncthreads() { barrier(0, 0, fibres.size()); }
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int step) {
    unsigned warp = running / 32 * 32;
    std::memcpy(&fibres[running].shuffled, &value, sizeof(T));
    barrier(1, warp, 32);
    T other;
    std::memcpy(&other, &fibres[running ^ step].shuffled, sizeof(T));
    barrier(1, warp, 32);
    return other;
}
static void enter() {
    (*body)();
    fibres[running].done = true;
    yield();
}

static void launch(unsigned grid_x, unsigned grid_y, unsigned block, const std::function<void()>& kernel) {
    body = &kernel;
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++) {
            fibres.resize(block);
            for (auto& fibre : fibres) {
                fibre.done = false;
                fibre.waits[0] = fibre.waits[1] = 0;
                getcontext(&fibre.context);
                fibre.context.uc_stack.ss_sp = fibre.stack.data();
                fibre.context.uc_stack.ss_size = fibre.stack.size();
                fibre.context.uc_link = nullptr;
                makecontext(&fibre.context, enter, 0);
            }
            for (bool alive = true; alive;) {
                alive = false;
                for (running = 0; running < block; running++)
                    if (!fibres[running].done) {
                        alive = true;
                        threadIdx.x = running;
                        swapcontext(&scheduler, &fibres[running].context);
                    }
            }
        }
}
