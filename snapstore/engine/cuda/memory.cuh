// Loads and stores of 16 bytes at any address. It precedes the source of every kernel.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Load 16 bytes from any address, in whole aligned words: a word that contains a requested byte is never out of bounds.
__device__ __forceinline__ uint4 load16(const u8* p) {
    u64 address = (u64)p;
    if ((address & 15) == 0) return *(const uint4*)p;
    const u32* words = (const u32*)(address & ~3ull);
    u32 shift = (u32)(address & 3) * 8;
    u32 a = words[0], b = words[1], c = words[2], d = words[3];
    if (shift == 0) return make_uint4(a, b, c, d);
    u32 e = words[4];
    return make_uint4(__funnelshift_r(a, b, shift), __funnelshift_r(b, c, shift), __funnelshift_r(c, d, shift),
                      __funnelshift_r(d, e, shift));
}

// Load count (1 to 16) bytes from any address; the rest is zero.
__device__ __forceinline__ uint4 load_tail(const u8* p, int count) {
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (i < count) word[i / 4] |= (u32)p[i] << (8 * (i % 4));
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ uint4 load_upto16(const u8* p, u64 left) {
    return left >= 16 ? load16(p) : load_tail(p, (int)left);
}

// Store the first count (1 to 16) bytes of a value at any address.
__device__ __forceinline__ void store_upto16(u8* p, uint4 value, u64 count) {
    if (count >= 16 && ((u64)p & 15) == 0) {
        *(uint4*)p = value;
        return;
    }
    u32 word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (i < count) p[i] = (u8)(word[i / 4] >> (8 * (i % 4)));
}

__device__ __forceinline__ uint4 xor16(uint4 a, uint4 b) {
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}
