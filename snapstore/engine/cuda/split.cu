// Split chunks, or their zigzagged differences from a base, or their XORs with it, into byte planes. Chunk and base are read once, planes are
// written once.
//
// grid (tiles of the longest chunk, n), block (THREADS); a tile is TILE bytes. Each thread takes 16 bytes of elements
// at a time and writes 16 / size bytes of each plane, so that a warp reads and writes whole cache lines.

#define THREADS 256
#define UNROLL 4
#define TILE (16 * THREADS * UNROLL)

template <int SIZE>
__device__ __forceinline__ uint4 rotate(uint4 v);  // rotate every element left by one bit
template <>
__device__ __forceinline__ uint4 rotate<1>(uint4 v) {
    return v;
}
template <>
__device__ __forceinline__ uint4 rotate<2>(uint4 v) {
#define ROTATE2(x) (((x) << 1 & 0xFFFEFFFEu) | ((x) >> 15 & 0x00010001u))
    return make_uint4(ROTATE2(v.x), ROTATE2(v.y), ROTATE2(v.z), ROTATE2(v.w));
}
template <>
__device__ __forceinline__ uint4 rotate<4>(uint4 v) {
#define ROTATE4(x) __funnelshift_l((x), (x), 1)
    return make_uint4(ROTATE4(v.x), ROTATE4(v.y), ROTATE4(v.z), ROTATE4(v.w));
}
template <>
__device__ __forceinline__ uint4 rotate<8>(uint4 v) {
    u64 a = lower(v), b = upper(v);
    a = a << 1 | a >> 63;
    b = b << 1 | b >> 63;
    return joined(a, b);
}

// Write the planes of 16 bytes, `at` elements from the start of each plane.
template <int SIZE>
__device__ __forceinline__ void put(uint4 v, u8* planes, u64 stride, u64 at);
template <>
__device__ __forceinline__ void put<1>(uint4 v, u8* planes, u64 stride, u64 at) {
    *(uint4*)(planes + at) = v;
}
template <>
__device__ __forceinline__ void put<2>(uint4 v, u8* planes, u64 stride, u64 at) {
    *(uint2*)(planes + at) = make_uint2(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420));
    *(uint2*)(planes + stride + at) = make_uint2(__byte_perm(v.x, v.y, 0x7531), __byte_perm(v.z, v.w, 0x7531));
}
template <>
__device__ __forceinline__ void put<4>(uint4 v, u8* planes, u64 stride, u64 at) {
    u32 a = __byte_perm(v.x, v.y, 0x5140), b = __byte_perm(v.z, v.w, 0x5140);  // x0 y0 x1 y1
    u32 c = __byte_perm(v.x, v.y, 0x7362), d = __byte_perm(v.z, v.w, 0x7362);  // x2 y2 x3 y3
    *(u32*)(planes + at) = __byte_perm(a, b, 0x5410);
    *(u32*)(planes + stride + at) = __byte_perm(a, b, 0x7632);
    *(u32*)(planes + 2 * stride + at) = __byte_perm(c, d, 0x5410);
    *(u32*)(planes + 3 * stride + at) = __byte_perm(c, d, 0x7632);
}
template <>
__device__ __forceinline__ void put<8>(uint4 v, u8* planes, u64 stride, u64 at) {
    u64 a = lower(v), b = upper(v);
#pragma unroll
    for (int k = 0; k < 8; k++)
        *(unsigned short*)(planes + k * stride + at) = (unsigned short)((a >> 8 * k & 255) | (b >> 8 * k & 255) << 8);
}

template <int SIZE, bool XORED>
__device__ void split_tile(const u8* chunk, const u8* base, u8* planes, u64 bytes, u64 stride, int layout) {
    const u64 start = (u64)blockIdx.x * TILE + 16 * threadIdx.x;
    uint4 state[UNROLL], prior[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        u64 at = start + 16 * THREADS * i;
        if (at < bytes) state[i] = load_upto16(chunk + at, bytes - at);
        if (at < bytes && base) prior[i] = load_upto16(base + at, bytes - at);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        u64 at = start + 16 * THREADS * i;
        if (at >= bytes) break;
        if (base && XORED) state[i] = xor16(state[i], prior[i]);
        if (base && !XORED)
            state[i] = zigzag16<SIZE>(state[i], prior[i]);
        else if (layout)
            state[i] = rotate<SIZE>(state[i]);
        put<SIZE>(state[i], planes, stride, at / SIZE);  // bytes beyond a plane stay in its stride, a multiple of 16
    }
}

// planes: address of plane 0 of every chunk; plane k begins k * strides[chunk] bytes later. Addresses and strides are
// multiples of 16; a stride is at least length / size. bases: 0 for none. layouts: of chunks and XORs; differences are
// never rotated. xored: whether deltas are XORs.
extern "C" __global__ void split(const u64* chunks, const u64* bases, const u64* planes, const u64* lengths,
                                 const u64* strides, const u8* element_sizes, const u8* layouts, u64 xored) {
    const u64 i = blockIdx.y, bytes = lengths[i];
    if ((u64)blockIdx.x * TILE >= bytes) return;
    const u8 *chunk = (const u8*)chunks[i], *base = (const u8*)bases[i];
#define SPLIT(SIZE, LAYOUT)                                                                                  \
    case SIZE:                                                                                               \
        if (xored)                                                                                           \
            split_tile<SIZE, true>(chunk, base, (u8*)planes[i], bytes, strides[i], LAYOUT);                  \
        else                                                                                                 \
            split_tile<SIZE, false>(chunk, base, (u8*)planes[i], bytes, strides[i], LAYOUT);                 \
        break;
    switch (element_sizes[i]) {
        SPLIT(1, 0)
        SPLIT(2, layouts[i])
        SPLIT(4, layouts[i])
        SPLIT(8, layouts[i])
    }
}
