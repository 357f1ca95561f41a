// Loads and stores at any address, and arithmetic of packed elements. It precedes the source of every kernel.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// What headers need that the extension in C includes as well; native.h has it for that.
#define SHARED __device__
#define TABLE __device__ __constant__
__device__ __forceinline__ u32 high_bit(u32 value) { return 31 - __clz(value); }
__device__ __forceinline__ u32 load32(const u8* p) {
    return (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
}
__device__ __forceinline__ u64 load64(const u8* p) {
    u64 value = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) value |= (u64)p[i] << (8 * i);
    return value;
}

// Begin to load a cache line into L2, for a later load.
__device__ __forceinline__ void prefetch(const void* address) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Load 16 bytes from any address, in aligned words: an aligned word with a requested byte is never out of bounds.
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

// Store the first bytes of a value at any address: `count`, but at most 16.
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

// Copy memory from any address to any address, by all threads of a block.
template <int THREADS>
__device__ __forceinline__ void copy(u8* destination, const u8* source, u64 length) {
    constexpr int UNROLL = 4;
    u64 head = (16 - ((u64)destination & 15)) & 15;  // up to the first aligned store
    if (head > length) head = length;
    if (threadIdx.x < head) destination[threadIdx.x] = source[threadIdx.x];
    source += head;
    destination += head;
    length -= head;
    const u64 whole = length / 16;
    for (u64 first = threadIdx.x; first < whole; first += THREADS * UNROLL) {
        uint4 values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (first + i * THREADS < whole) values[i] = load16(source + 16 * (first + i * THREADS));
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (first + i * THREADS < whole) *(uint4*)(destination + 16 * (first + i * THREADS)) = values[i];
    }
    const u64 tail = 16 * whole + threadIdx.x;
    if (tail < length) destination[tail] = source[tail];
}

__device__ __forceinline__ u64 lower(uint4 v) { return (u64)v.y << 32 | v.x; }
__device__ __forceinline__ u64 upper(uint4 v) { return (u64)v.w << 32 | v.z; }
__device__ __forceinline__ uint4 joined(u64 lower, u64 upper) {
    return make_uint4((u32)lower, (u32)(lower >> 32), (u32)upper, (u32)(upper >> 32));
}

// Elements of SIZE bytes packed in a word (u32; u64 for SIZE 8): sums and differences modulo 2^(8 SIZE), and the zigzag
// form, in which small differences of either sign are small numbers.
template <int SIZE>
struct Elements {
    typedef u32 Word;
    static constexpr u32 LOW = SIZE == 1 ? 0x01010101u : SIZE == 2 ? 0x00010001u : 1u;  // each element's lowest bit
    static constexpr int SIGN = 8 * SIZE - 1;
    static constexpr u32 HIGH = LOW << SIGN, ONES = (2u << SIGN) - 1;
    static __device__ __forceinline__ u32 sum(u32 a, u32 b) { return ((a & ~HIGH) + (b & ~HIGH)) ^ ((a ^ b) & HIGH); }
    static __device__ __forceinline__ u32 difference(u32 a, u32 b) {
        return ((a | HIGH) - (b & ~HIGH)) ^ (~(a ^ b) & HIGH);
    }
    static __device__ __forceinline__ u32 zigzag(u32 d) { return (d << 1 & ~LOW) ^ ((d >> SIGN & LOW) * ONES); }
    static __device__ __forceinline__ u32 unzigzag(u32 z) { return (z >> 1 & ~HIGH) ^ ((z & LOW) * ONES); }
};
template <>
struct Elements<8> {
    typedef u64 Word;
    static __device__ __forceinline__ u64 sum(u64 a, u64 b) { return a + b; }
    static __device__ __forceinline__ u64 difference(u64 a, u64 b) { return a - b; }
    static __device__ __forceinline__ u64 zigzag(u64 d) { return d << 1 ^ (0 - (d >> 63)); }
    static __device__ __forceinline__ u64 unzigzag(u64 z) { return z >> 1 ^ (0 - (z & 1)); }
};

// The same for 16 bytes of elements.
template <int SIZE>
__device__ __forceinline__ uint4 zigzag16(uint4 a, uint4 b) {  // of a - b
    typedef Elements<SIZE> E;
    return make_uint4(E::zigzag(E::difference(a.x, b.x)), E::zigzag(E::difference(a.y, b.y)),
                      E::zigzag(E::difference(a.z, b.z)), E::zigzag(E::difference(a.w, b.w)));
}
template <>
__device__ __forceinline__ uint4 zigzag16<8>(uint4 a, uint4 b) {
    typedef Elements<8> E;
    return joined(E::zigzag(lower(a) - lower(b)), E::zigzag(upper(a) - upper(b)));
}
template <int SIZE>
__device__ __forceinline__ uint4 unzigzag16(uint4 z) {
    typedef Elements<SIZE> E;
    return make_uint4(E::unzigzag(z.x), E::unzigzag(z.y), E::unzigzag(z.z), E::unzigzag(z.w));
}
template <>
__device__ __forceinline__ uint4 unzigzag16<8>(uint4 z) {
    return joined(Elements<8>::unzigzag(lower(z)), Elements<8>::unzigzag(upper(z)));
}
template <int SIZE>
__device__ __forceinline__ uint4 sum16(uint4 a, uint4 b) {
    typedef Elements<SIZE> E;
    return make_uint4(E::sum(a.x, b.x), E::sum(a.y, b.y), E::sum(a.z, b.z), E::sum(a.w, b.w));
}
template <>
__device__ __forceinline__ uint4 sum16<8>(uint4 a, uint4 b) {
    return joined(lower(a) + lower(b), upper(a) + upper(b));
}

__device__ __forceinline__ uint4 xor16(uint4 a, uint4 b) {
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}

// Load or store an element at an address that is not a multiple of its size. It is rare, so it is not inlined.
__device__ __noinline__ u64 load_bytes(const u8* p, int size) {
    u64 value = 0;
#pragma unroll 1
    for (int i = 0; i < size; i++) value |= (u64)p[i] << (8 * i);
    return value;
}
__device__ __noinline__ void store_bytes(u8* p, u64 value, int size) {
#pragma unroll 1
    for (int i = 0; i < size; i++) p[i] = (u8)(value >> (8 * i));
}

// Load or store one element of `size` bytes (1, 2, 4 or 8) at any address.
__device__ __forceinline__ u64 load_element(const u8* p, int size) {
    if (size == 1) return *p;
    if ((u64)p & (size - 1)) return load_bytes(p, size);
    if (size == 2) return *(const unsigned short*)p;
    if (size == 4) return *(const u32*)p;
    return *(const u64*)p;
}

__device__ __forceinline__ void store_element(u8* p, u64 value, int size) {
    if ((u64)p & (size - 1)) return store_bytes(p, value, size);
    if (size == 1) *p = (u8)value;
    if (size == 2) *(unsigned short*)p = (unsigned short)value;
    if (size == 4) *(u32*)p = (u32)value;
    if (size == 8) *(u64*)p = value;
}
