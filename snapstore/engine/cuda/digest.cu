// Seeded XXH3-128, and XXH3-64 without a seed, of many buffers at once, bit-equal to xxHash 0.8 for every length and
// alignment; see ../native/xxh3.h, which precedes this source. A word of the seeded secret is one addition, so each
// thread computes the words that it needs, once per buffer, in registers. A table would have to be read from memory.
//
// In the long-input mode the sum over the 16 stripes of a 1 KiB block is independent of earlier blocks: only
// `acc = scramble(acc + block_sum)` is serial. So WORKERS warps sum blocks as fast as memory delivers them, a tile of
// TILE blocks at a time. Meanwhile one more warp, with a lane per accumulator, chains the sums of the previous tile.
//
// One thread block per buffer: grid (n), block (THREADS).

#define WORKERS 16
#define THREADS (32 * (WORKERS + 1))
#define TILE 128

__device__ __forceinline__ u64 custom_word(int word, u64 seed) {  // a word of the seeded secret
    return SECRET[word] + (word % 2 ? 0 - seed : seed);
}
__device__ __forceinline__ u64 custom64(int offset, u64 seed) {  // 64 bits of it, from any byte on
    int word = offset / 8, bits = offset % 8 * 8;
    u64 low = custom_word(word, seed);
    return bits == 0 ? low : low >> bits | custom_word(word + 1, seed) << (64 - bits);
}
SHARED u64 secret64(int offset) { return custom64(offset, 0); }
SHARED u64 multiply_high(u64 a, u64 b) { return __umul64hi(a, b); }
__device__ __forceinline__ u64 multiply32(u64 a, u64 b) { return (a & 0xFFFFFFFFull) * (b & 0xFFFFFFFFull); }

__device__ __forceinline__ void accumulate(u64& a0, u64& a1, uint4 data, u64 k0, u64 k1) {
    u64 d0 = (u64)data.y << 32 | data.x, d1 = (u64)data.w << 32 | data.z;
    k0 ^= d0;
    k1 ^= d1;
    a0 += (k0 & 0xFFFFFFFFull) * (k0 >> 32) + d1;
    a1 += (k1 & 0xFFFFFFFFull) * (k1 >> 32) + d0;
}

// Sum a 1 KiB block, with all lanes of a warp: lane 4s+j takes accumulators 2j and 2j+1 of stripes s and 8+s.
__device__ __forceinline__ void sum_block(const u8* block, u64 keys[4], int lane, u64 out[8]) {
    uint4 first = load16(block + 16 * lane), second = load16(block + 512 + 16 * lane);
    u64 a0 = 0, a1 = 0;
    accumulate(a0, a1, first, keys[0], keys[1]);
    accumulate(a0, a1, second, keys[2], keys[3]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        a0 += __shfl_xor_sync(0xFFFFFFFFu, a0, step);
        a1 += __shfl_xor_sync(0xFFFFFFFFu, a1, step);
    }
    if (lane < 4) {
        out[2 * lane] = a0;
        out[2 * lane + 1] = a1;
    }
}

__device__ __forceinline__ u64 stripe(const u8* in, int lane, u64 secret) {  // a stripe's part of accumulator `lane`
    u64 keyed = load64(in + 8 * lane) ^ secret;
    return multiply32(keyed, keyed >> 32) + load64(in + 8 * (lane ^ 1));
}

__device__ u64 merge_accumulators(const u64* acc, int secret, u64 seed, u64 start) {
    for (int i = 0; i < 4; i++)
        start += fold64(acc[2 * i] ^ custom64(secret + 16 * i, seed),
                        acc[2 * i + 1] ^ custom64(secret + 16 * i + 8, seed));
    return avalanche(start);
}

// `what`: 0 writes XXH3-128 to out[2i], canonical (big-endian); 1 writes XXH3-64 to out[i]; 2 writes XXH3-64 to the 8
// bytes before the input (a blob's checksum precedes the bytes that it covers). `seed`: of XXH3-128; 0 for XXH3-64.
//
// Three thread blocks must fit on a multiprocessor, which leaves 32 registers per thread: on an H200, 3,072 chunks of
// 1 MiB hash at 3,971 GB/s. Without this bound the compiler takes 60 registers; then one block fits, and the rate is
// 2,354 GB/s.
extern "C" __global__ void __launch_bounds__(THREADS, 3) digest(const u64* addresses, const u64* lengths, u64* out, u64 what, u64 seed) {
    __shared__ u64 sums[2][TILE][8];
    __shared__ u64 final_acc[8];
    const u8* in = (const u8*)addresses[blockIdx.x];
    const u64 n = lengths[blockIdx.x];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Hash128 result = {0, 0};
    if (n > LONG_ABOVE) {
        const u64 blocks = (n - 1) / 1024;
        const u64 tiles = (blocks + TILE - 1) / TILE;
        const int k = lane / 4 + 2 * (lane % 4);
        u64 keys[4];
        for (int i = 0; i < 4; i++) keys[i] = custom_word(k + i % 2 + i / 2 * 8, seed);
        const u64 scramble = custom_word(16 + lane % 8, seed);
        const u64 start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
        u64 acc = start[lane % 8];
        for (u64 tile = 0; tile <= tiles; tile++) {
            if (warp < WORKERS) {
                if (tile < tiles) {
                    int count = (int)(blocks - tile * TILE < TILE ? blocks - tile * TILE : TILE);
#pragma unroll 4
                    for (int b = warp; b < count; b += WORKERS)
                        sum_block(in + (tile * TILE + b) * 1024, keys, lane, sums[tile & 1][b]);
                }
            } else if (tile > 0 && lane < 8) {
                u64 done = (tile - 1) * TILE;
                int count = (int)(blocks - done < TILE ? blocks - done : TILE);
#pragma unroll 8
                for (int b = 0; b < count; b++) {
                    acc += sums[(tile - 1) & 1][b][lane];
                    acc = (acc ^ acc >> 47 ^ scramble) * P32_1;
                }
            }
            __syncthreads();
        }
        if (warp == WORKERS && lane < 8) {
            const u8* rest = in + blocks * 1024;
            int stripes = (int)((n - 1 - blocks * 1024) / 64);
            for (int s = 0; s < stripes; s++) acc += stripe(rest + 64 * s, lane, custom_word(s + lane, seed));
            acc += stripe(in + n - 64, lane, custom64(121 + 8 * lane, seed));
            final_acc[lane] = acc;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            result.low = merge_accumulators(final_acc, 11, seed, n * P64_1);
            if (what == 0) result.high = merge_accumulators(final_acc, 117, seed, ~(n * P64_2));
        }
    } else if (threadIdx.x == 0) {
        if (what == 0)
            result = short_128(in, n, seed);
        else
            result.low = short_64(in, n);
    }
    if (threadIdx.x != 0) return;
    if (what == 0) {
        out[2 * blockIdx.x] = swap64(result.high);
        out[2 * blockIdx.x + 1] = swap64(result.low);
    } else if (what == 1) {
        out[blockIdx.x] = result.low;
    } else {
        u8* before = (u8*)in - 8;
        for (int i = 0; i < 8; i++) before[i] = (u8)(result.low >> (8 * i));
    }
}
