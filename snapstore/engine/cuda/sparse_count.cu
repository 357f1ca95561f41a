// Count the elements in which chunks differ from their bases, by the byte of the base that decides the group, and join
// neighbouring bytes to groups, as format/codecs/sparse.py does.
//
// One thread block per chunk: grid (n), block (THREADS).

#define UNROLL 8
#define MIN_GROUP 128
#define ALONE_ABOVE 32768
#define SAMPLED 61
#define DENSE_ABOVE_SHARE 0.55

template <int SIZE>
__device__ void count(const u8* chunk, const u8* base, u64 elements, int layout, u32* changed, u32* members,
                      u32* sampled) {
    const u32 lane = threadIdx.x % 32;
    for (u64 first = 0; first < elements; first += THREADS * UNROLL) {
        u64 before[UNROLL], after[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const u64 at = first + THREADS * i + threadIdx.x;
            before[i] = at < elements ? load_element(base + at * SIZE, SIZE) : 0;
            after[i] = at < elements ? load_element(chunk + at * SIZE, SIZE) : 0;
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const bool there = first + THREADS * i + threadIdx.x < elements;
            const u32 key = key_of(before[i], SIZE, layout);
            const u32 same = same_number(key, layout ? 8 : 0, there);
            if (there && !(same & ((1u << lane) - 1))) atomicAdd(&members[key], __popc(same));
            if (before[i] != after[i]) atomicAdd(&changed[key], 1u);
            if (there && (u32)(first + THREADS * i + threadIdx.x) % SAMPLED == 0) atomicAdd(&sampled[key], 1u);
        }
    }
}

// groups: (n, GROUPS); counted[i].groups of them are filled.
extern "C" __global__ void __launch_bounds__(THREADS, 2) sparse_count(const u64* chunks, const u64* bases,
                                                                      const u64* elements, const u8* sizes,
                                                                      const u8* layouts, Counted* counted,
                                                                      CountedGroup* groups) {
    __shared__ u32 changed[256], members[256], sampled[256];
    const u32 i = blockIdx.x;
    for (u32 key = threadIdx.x; key < 256; key += THREADS) changed[key] = members[key] = sampled[key] = 0;
    __syncthreads();
    const u8 *chunk = (const u8*)chunks[i], *base = (const u8*)bases[i];
    switch (sizes[i]) {
        case 1: count<1>(chunk, base, elements[i], layouts[i], changed, members, sampled); break;
        case 2: count<2>(chunk, base, elements[i], layouts[i], changed, members, sampled); break;
        case 4: count<4>(chunk, base, elements[i], layouts[i], changed, members, sampled); break;
        case 8: count<8>(chunk, base, elements[i], layouts[i], changed, members, sampled); break;
    }
    __syncthreads();
    if (threadIdx.x) return;
    Counted found = {0, 0, 0, 0};
    for (u32 key = 0; key < 256; key++) found.changed += changed[key];
    u32 own = 0, all = 0, seen = 0, left = found.changed;
    const auto end_group = [&](u32 last_key) {
        const bool dense = own > DENSE_ABOVE_SHARE * all;
        groups[(u64)GROUPS * i + found.groups++] = {found.listed, own, all, (u8)last_key, dense, {0, 0}};
        found.listed += dense ? all : own;
        own = all = seen = 0;
    };
    for (u32 key = 0; key < 256; key++) {
        const bool alone = sampled[key] * SAMPLED > ALONE_ABOVE;
        if (alone && seen) end_group(key - 1);
        own += changed[key];
        all += members[key];
        seen += sampled[key];
        left -= changed[key];
        if (key == 255 || alone || (own >= MIN_GROUP && left >= MIN_GROUP)) end_group(key);
    }
    counted[i] = found;
}
