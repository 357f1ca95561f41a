// Seeded XXH3-128, and XXH3-64 without a seed, of many buffers at once, bit-equal to xxHash 0.8 for every length and
// alignment. Specification: https://github.com/Cyan4973/xxHash/blob/v0.8.3/doc/xxhash_spec.md
//
// Up to 240 bytes, the seed is mixed into the words of the default secret when they are used. Beyond 240 bytes, the
// seed makes another secret: even 64-bit words plus the seed, odd words minus the seed. That is one addition per word,
// so each thread computes the words that it needs, once per buffer, in registers. A table of words would have to be
// read from memory.
//
// In the long-input mode the sum over the 16 stripes of a 1 KiB block is independent of earlier blocks: only
// `acc = scramble(acc + block_sum)` is serial. So WORKERS warps sum blocks as fast as memory delivers them, a tile of
// TILE blocks at a time. Meanwhile one more warp, with a lane per accumulator, chains the sums of the previous tile.
//
// One thread block per buffer: grid (n), block (THREADS).

#define WORKERS 16
#define THREADS (32 * (WORKERS + 1))
#define TILE 128

#define P32_1 0x9E3779B1ull
#define P32_2 0x85EBCA77ull
#define P32_3 0xC2B2AE3Dull
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define P64_5 0x27D4EB2F165667C5ull
#define MX1 0x165667919E3779F9ull
#define MX2 0x9FB21C651E98DF25ull

__device__ __constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};

struct Hash128 {
    u64 low, high;
};

__device__ __forceinline__ u64 read64(const u8* p) {
    u64 value = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) value |= (u64)p[i] << (8 * i);
    return value;
}
__device__ __forceinline__ u64 read32(const u8* p) {
    return (u64)p[0] | (u64)p[1] << 8 | (u64)p[2] << 16 | (u64)p[3] << 24;
}
__device__ __forceinline__ u64 custom_word(int word, u64 seed) {  // a word of the seeded secret
    return SECRET[word] + (word % 2 ? 0 - seed : seed);
}
__device__ __forceinline__ u64 custom64(int offset, u64 seed) {  // 64 bits of it, from any byte on
    int word = offset / 8, bits = offset % 8 * 8;
    u64 low = custom_word(word, seed);
    return bits == 0 ? low : low >> bits | custom_word(word + 1, seed) << (64 - bits);
}
__device__ __forceinline__ u64 secret64(int offset) { return custom64(offset, 0); }  // 64 bits of the default secret
__device__ __forceinline__ u64 swap64(u64 x) {
    x = (x & 0x00000000FFFFFFFFull) << 32 | x >> 32;
    x = (x & 0x0000FFFF0000FFFFull) << 16 | (x >> 16 & 0x0000FFFF0000FFFFull);
    return (x & 0x00FF00FF00FF00FFull) << 8 | (x >> 8 & 0x00FF00FF00FF00FFull);
}
__device__ __forceinline__ u64 rotl64(u64 x, int bits) { return x << bits | x >> (64 - bits); }
__device__ __forceinline__ u64 multiply32(u64 a, u64 b) { return (a & 0xFFFFFFFFull) * (b & 0xFFFFFFFFull); }
__device__ __forceinline__ Hash128 multiply64(u64 a, u64 b) { return {a * b, __umul64hi(a, b)}; }
__device__ __forceinline__ u64 fold64(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }
__device__ __forceinline__ u64 avalanche(u64 h) {
    h ^= h >> 37;
    h *= MX1;
    return h ^ h >> 32;
}
__device__ __forceinline__ u64 avalanche64(u64 h) {  // as in XXH64
    h ^= h >> 33;
    h *= P64_2;
    h ^= h >> 29;
    h *= P64_3;
    return h ^ h >> 32;
}

// -- up to 240 bytes

__device__ u64 mix16(const u8* in, int secret, u64 seed) {
    return fold64(read64(in) ^ (secret64(secret) + seed), read64(in + 8) ^ (secret64(secret + 8) - seed));
}
__device__ void mix32(Hash128& acc, const u8* a, const u8* b, int secret, u64 seed) {
    acc.low += mix16(a, secret, seed);
    acc.low ^= read64(b) + read64(b + 8);
    acc.high += mix16(b, secret + 16, seed);
    acc.high ^= read64(a) + read64(a + 8);
}
__device__ u32 swap32(u32 x) { return x << 24 | (x & 0xFF00) << 8 | (x >> 8 & 0xFF00) | x >> 24; }

__device__ Hash128 short128(const u8* in, u64 n, u64 seed) {
    if (n == 0)
        return {avalanche64(seed ^ secret64(64) ^ secret64(72)), avalanche64(seed ^ secret64(80) ^ secret64(88))};
    if (n <= 3) {
        u32 low = (u32)in[0] << 16 | (u32)in[n >> 1] << 24 | in[n - 1] | (u32)n << 8;
        u32 swapped = swap32(low);
        u32 high = swapped << 13 | swapped >> 19;
        u32 flip_low = (u32)secret64(0) ^ (u32)secret64(4), flip_high = (u32)secret64(8) ^ (u32)secret64(12);
        return {avalanche64(low ^ (flip_low + seed)), avalanche64(high ^ (flip_high - seed))};
    }
    if (n <= 8) {
        seed ^= (u64)swap32((u32)seed) << 32;
        u64 keyed = (read32(in) + (read32(in + n - 4) << 32)) ^ ((secret64(16) ^ secret64(24)) + seed);
        Hash128 m = multiply64(keyed, P64_1 + (n << 2));
        m.high += m.low << 1;
        m.low ^= m.high >> 3;
        m.low ^= m.low >> 35;
        m.low *= MX2;
        m.low ^= m.low >> 28;
        m.high = avalanche(m.high);
        return m;
    }
    if (n <= 16) {
        u64 low = read64(in), high = read64(in + n - 8);
        Hash128 m = multiply64(low ^ high ^ ((secret64(32) ^ secret64(40)) - seed), P64_1);
        m.low += (n - 1) << 54;
        high ^= (secret64(48) ^ secret64(56)) + seed;
        m.high += high + multiply32(high, P32_2 - 1);
        m.low ^= swap64(m.high);
        Hash128 h = multiply64(m.low, P64_2);
        h.high += m.high * P64_2;
        return {avalanche(h.low), avalanche(h.high)};
    }
    Hash128 acc = {n * P64_1, 0};
    if (n <= 128) {
        for (int i = (int)(n - 1) / 32; i >= 0; i--) mix32(acc, in + 16 * i, in + n - 16 * (i + 1), 32 * i, seed);
    } else {
        for (int i = 32; i < 160; i += 32) mix32(acc, in + i - 32, in + i - 16, i - 32, seed);
        acc.low = avalanche(acc.low);
        acc.high = avalanche(acc.high);
        for (int i = 160; i <= n; i += 32) mix32(acc, in + i - 32, in + i - 16, 3 + i - 160, seed);
        mix32(acc, in + n - 16, in + n - 32, 136 - 17 - 16, 0 - seed);
    }
    u64 high = acc.low * P64_1 + acc.high * P64_4 + (n - seed) * P64_2;
    return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

__device__ u64 short64(const u8* in, u64 n) {
    if (n == 0) return avalanche64(secret64(56) ^ secret64(64));
    if (n <= 3) {
        u32 combined = (u32)in[0] << 16 | (u32)in[n >> 1] << 24 | in[n - 1] | (u32)n << 8;
        return avalanche64(combined ^ (u64)((u32)secret64(0) ^ (u32)secret64(4)));
    }
    if (n <= 8) {
        u64 h = (read32(in + n - 4) + (read32(in) << 32)) ^ (secret64(8) ^ secret64(16));
        h ^= rotl64(h, 49) ^ rotl64(h, 24);
        h *= MX2;
        h ^= (h >> 35) + n;
        h *= MX2;
        return h ^ h >> 28;
    }
    if (n <= 16) {
        u64 low = read64(in) ^ (secret64(24) ^ secret64(32)), high = read64(in + n - 8) ^ (secret64(40) ^ secret64(48));
        return avalanche(n + swap64(low) + high + fold64(low, high));
    }
    u64 acc = n * P64_1;
    if (n <= 128) {
        for (int i = (int)(n - 1) / 32; i >= 0; i--)
            acc += mix16(in + 16 * i, 32 * i, 0) + mix16(in + n - 16 * (i + 1), 32 * i + 16, 0);
        return avalanche(acc);
    }
    for (int i = 0; i < 8; i++) acc += mix16(in + 16 * i, 16 * i, 0);
    acc = avalanche(acc);
    for (int i = 8; i < n / 16; i++) acc += mix16(in + 16 * i, 16 * (i - 8) + 3, 0);
    return avalanche(acc + mix16(in + n - 16, 136 - 17, 0));
}

// -- more than 240 bytes

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
    u64 keyed = read64(in + 8 * lane) ^ secret;
    return multiply32(keyed, keyed >> 32) + read64(in + 8 * (lane ^ 1));
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
    if (n > 240) {
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
            result = short128(in, n, seed);
        else
            result.low = short64(in, n);
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
