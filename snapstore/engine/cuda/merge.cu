// Merge chains of byte planes into chunks: apply the deltas of all blobs of a chain, the oldest first, to the full chunk at
// its end, or to a plain base: add differences, XOR XORs. The inverse of split.cu.
//
// grid (tiles of the longest chunk, n), block (THREADS); a tile is TILE bytes of the chunk. Planes may begin at any
// address: raw planes lie inside the payload of a blob.

#define THREADS 256
#define UNROLL 2
#define TILE (16 * THREADS * UNROLL)

// Load COUNT (1 to 8) bytes of a plane from any address; the plane has `left` more bytes.
template <int COUNT>
__device__ __forceinline__ u64 load_plane(const u8* p, u64 left) {
    if (left >= COUNT) {
        if (((u64)p & (COUNT - 1)) == 0) {
            if (COUNT == 8) return *(const u64*)p;
            if (COUNT == 4) return *(const u32*)p;
            if (COUNT == 2) return *(const unsigned short*)p;
        }
        if (COUNT == 4) {
            const u32* words = (const u32*)((u64)p & ~3ull);
            return __funnelshift_r(words[0], words[1], (u32)((u64)p & 3) * 8);
        }
        if (COUNT == 8) {
            const u32* words = (const u32*)((u64)p & ~3ull);
            u32 shift = (u32)((u64)p & 3) * 8;
            if (shift == 0) return (u64)words[1] << 32 | words[0];
            return (u64)__funnelshift_r(words[1], words[2], shift) << 32 | __funnelshift_r(words[0], words[1], shift);
        }
    }
    u64 value = 0;
    for (int i = 0; i < COUNT && i < left; i++) value |= (u64)p[i] << (8 * i);
    return value;
}

// Merge 16 / SIZE bytes of each plane into 16 bytes of elements.
template <int SIZE>
__device__ __forceinline__ uint4 join(const u64* part);
template <>
__device__ __forceinline__ uint4 join<2>(const u64* part) {
    u32 a = (u32)part[0], b = (u32)part[1], c = (u32)(part[0] >> 32), d = (u32)(part[1] >> 32);
    return make_uint4(__byte_perm(a, b, 0x5140), __byte_perm(a, b, 0x7362), __byte_perm(c, d, 0x5140),
                      __byte_perm(c, d, 0x7362));
}
template <>
__device__ __forceinline__ uint4 join<4>(const u64* part) {
    u32 a = __byte_perm((u32)part[0], (u32)part[1], 0x5140), b = __byte_perm((u32)part[2], (u32)part[3], 0x5140);
    u32 c = __byte_perm((u32)part[0], (u32)part[1], 0x7362), d = __byte_perm((u32)part[2], (u32)part[3], 0x7362);
    return make_uint4(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                      __byte_perm(c, d, 0x7632));
}
template <>
__device__ __forceinline__ uint4 join<8>(const u64* part) {
    u64 a = 0, b = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        a |= (part[k] & 255) << (8 * k);
        b |= (part[k] >> 8 & 255) << (8 * k);
    }
    return joined(a, b);
}

template <int SIZE>
__device__ __forceinline__ uint4 unrotate(uint4 v);  // rotate every element right by one bit
template <>
__device__ __forceinline__ uint4 unrotate<1>(uint4 v) {
    return v;
}
template <>
__device__ __forceinline__ uint4 unrotate<2>(uint4 v) {
#define UNROTATE2(x) (((x) >> 1 & 0x7FFF7FFFu) | ((x) << 15 & 0x80008000u))
    return make_uint4(UNROTATE2(v.x), UNROTATE2(v.y), UNROTATE2(v.z), UNROTATE2(v.w));
}
template <>
__device__ __forceinline__ uint4 unrotate<4>(uint4 v) {
#define UNROTATE4(x) __funnelshift_r((x), (x), 1)
    return make_uint4(UNROTATE4(v.x), UNROTATE4(v.y), UNROTATE4(v.z), UNROTATE4(v.w));
}
template <>
__device__ __forceinline__ uint4 unrotate<8>(uint4 v) {
    u64 a = lower(v), b = upper(v);
    a = a >> 1 | a << 63;
    b = b >> 1 | b << 63;
    return joined(a, b);
}

enum { FULL, FULL_ROTATED, DIFFERENCE, XOR, XOR_ROTATED };  // the content of a blob's planes

// Load 16 bytes of elements from planes, `at` elements from their start.
template <int SIZE>
__device__ __forceinline__ uint4 load_elements(const u64* planes, u64 at, u64 elements) {
    u64 part[SIZE];
#pragma unroll
    for (int k = 0; k < SIZE; k++) part[k] = load_plane<16 / SIZE>((const u8*)planes[k] + at, elements - at);
    return join<SIZE>(part);
}
template <>
__device__ __forceinline__ uint4 load_elements<1>(const u64* planes, u64 at, u64 elements) {
    return load_upto16((const u8*)planes[0] + at, elements - at);
}

template <int SIZE>
__device__ void merge_tile(const u64* planes, const u8* kinds, u64 blobs, const u8* base, u8* out, u64 bytes) {
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        u64 at = (u64)blockIdx.x * TILE + 16 * (threadIdx.x + THREADS * i);
        if (at >= bytes) return;
        uint4 sum = base ? load_upto16(base + at, bytes - at) : make_uint4(0, 0, 0, 0);
        for (u64 blob = blobs; blob-- > 0;) {  // the newest blob is the first
            const u8 kind = kinds[blob];
            uint4 v = load_elements<SIZE>(planes + 8 * blob, at / SIZE, bytes / SIZE);
            if (kind == DIFFERENCE) v = unzigzag16<SIZE>(v);
            if (kind == FULL_ROTATED || kind == XOR_ROTATED) v = unrotate<SIZE>(v);
            sum = kind >= XOR ? xor16(sum, v) : sum16<SIZE>(sum, v);
        }
        store_upto16(out + at, sum, bytes - at);
    }
}

// planes: (refs, 8) addresses; kinds: (refs,) of their blobs. Chunk i has the rows firsts[i] to firsts[i + 1] - 1.
// bases: addresses of plain bytes, 0 for none; a base may be the chunk's own output.
extern "C" __global__ void merge(const u64* planes, const u8* kinds, const u64* firsts, const u64* bases,
                                 const u64* outs, const u64* lengths, const u8* element_sizes) {
    const u64 i = blockIdx.y, bytes = lengths[i];
    if ((u64)blockIdx.x * TILE >= bytes) return;
    const u64 *own = planes + 8 * firsts[i], blobs = firsts[i + 1] - firsts[i];
    kinds += firsts[i];
    const u8* base = (const u8*)bases[i];
    u8* out = (u8*)outs[i];
    switch (element_sizes[i]) {
        case 1: merge_tile<1>(own, kinds, blobs, base, out, bytes); break;
        case 2: merge_tile<2>(own, kinds, blobs, base, out, bytes); break;
        case 4: merge_tile<4>(own, kinds, blobs, base, out, bytes); break;
        case 8: merge_tile<8>(own, kinds, blobs, base, out, bytes); break;
    }
}
