// Definitions that the kernels of sparse deltas share. It precedes their sources.

#define ALL 0xFFFFFFFFu
#define THREADS 512
#define WARPS (THREADS / 32)
#define GROUP_THREADS 128  // of the kernels that decode a blob or a group per block: most groups have few changes
#define GROUPS 256       // the most groups of a delta
#define DENSE 255        // the gap shift of a group that has a value for every element
#define MAX_GAP_SHIFT 26  // of a group that is not dense
#define ENDS_FRAMES 1     // the flag of a group after which streams begin new frames
#define GAP_ESCAPE 84    // the quotient in a symbol if the real quotient is in the low parts
#define OTHER 2          // the kind of a difference that is stored as a value
#define VALUE_ESCAPE 255  // the symbol of a value whose quotient is in the low parts

// A blob to decode: begin and end address of its low parts; its groups and frames.
struct Blob {
    u64 low, low_end, elements;
    u32 first_group, groups, first_frame, frames;
    u8 element_size, layout, unused[6];
};
// A group of a blob: addresses of its symbols of gaps and of values, and of memory for ranks, differences and values.
// `progress`: how many tiles are done, and how many elements and changes of the group lie in them: see sparse_apply.cu.
struct Group {
    u64 symbols, values, ranks, zigzag, found;
    u32 gaps, value_count, blob;
    u8 last_key, gap_shift, value_shift, unused;
    u64 progress;
};
// The low parts of a group: how many gaps and values have their quotient there, and the bytes of all low parts.
struct Low {
    u32 gaps, values;
    u64 bytes;
};

// The counts of a chunk to encode. `listed`: all elements of dense groups, and the changed elements of other groups.
struct Counted {
    u32 changed, groups, listed, unused;
};
// A group of such a chunk. `first`: how many elements of earlier groups are listed.
struct CountedGroup {
    u32 first, changed, members;
    u8 last_key, dense, unused[2];
};
// A chunk to encode: addresses of the chunk, its base, its CountedGroups, and the memory for the results.
struct Job {
    u64 chunk, base, elements, groups, ranks, zigzag, found, symbols, values, table, low, low_room;
    u32 group_count;
    u8 element_size, layout, unused[2];
};

// Return the key of a base's element: the byte that decides its group.
__device__ __forceinline__ u32 key_of(u64 element, int size, int layout) {
    if (!layout) return 0;
    return (size == 1 ? element << 1 | element >> 7 : element >> (8 * size - 9)) & 255;
}

// Return element i of 16 bytes of elements.
template <int SIZE>
__device__ __forceinline__ u64 element_of(uint4 v, int i) {
    if (SIZE == 8) return i ? upper(v) : lower(v);
    const u32 words[4] = {v.x, v.y, v.z, v.w}, word = words[i * SIZE / 4];
    return SIZE == 4 ? word : word >> (8 * (i * SIZE % 4)) & ((1u << (8 * SIZE % 32)) - 1);
}

// Load or store an element at an address that is a multiple of its size.
template <int SIZE>
__device__ __forceinline__ u64 load_aligned(const u8* p) {
    if (SIZE == 1) return *p;
    if (SIZE == 2) return *(const unsigned short*)p;
    if (SIZE == 4) return *(const u32*)p;
    return *(const u64*)p;
}
template <int SIZE>
__device__ __forceinline__ void store_aligned(u8* p, u64 value) {
    if (SIZE == 1) *p = (u8)value;
    if (SIZE == 2) *(unsigned short*)p = (unsigned short)value;
    if (SIZE == 4) *(u32*)p = (u32)value;
    if (SIZE == 8) *(u64*)p = value;
}

// Return the zigzag form of a difference of elements; only its lowest SIZE bytes count.
template <int SIZE>
__device__ __forceinline__ u64 zigzag_of(u64 difference) {
    const u64 most = ~0ull >> (64 - 8 * SIZE);
    return (difference << 1 ^ (0 - (difference >> (8 * SIZE - 1) & 1))) & most;
}

// Return the mask of the lanes of the warp that are `there` and have the same number, of `bits` bits.
__device__ __forceinline__ u32 same_number(u32 number, int bits, bool there) {
    u32 same = __ballot_sync(ALL, there);
    for (int bit = 0; bit < bits; bit++) {
        const bool set = number >> bit & 1;
        const u32 lanes = __ballot_sync(ALL, set);
        same &= set ? lanes : ~lanes;
    }
    return same;
}

__device__ __forceinline__ int bits_of(u32 groups) {  // the bits of a number below `groups`
    int bits = 0;
    while (1u << bits < groups) bits++;
    return bits;
}

// Return the sum of the values of all earlier threads; `total`: of all COUNT threads.
template <u32 COUNT = THREADS>
__device__ __noinline__ u64 scan(u64 value, u64& total) {
    __shared__ u64 sums[COUNT / 32];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 sum = value;
    for (u32 step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();  // the sums of the previous scan have been read
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (u32 i = 0; i < COUNT / 32; i++) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before + sum - value;
}
