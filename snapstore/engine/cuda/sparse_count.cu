// Count the changed elements of chunks by key, the byte of the base that decides the group. Then join neighbouring keys
// to groups, as format/blobs/codecs/sparse.py does.
//
// One thread block per chunk: grid (n), block (THREADS).

#define UNROLL 4  // parts of 16 bytes that a thread reads at once
#define MIN_GROUP 128
#define ALONE_ABOVE 32768
#define SAMPLED 61
#define DENSE_ABOVE_SHARE 0.55

struct Room {
    u32 members[256][32];  // elements by key; a column per lane: no two lanes of a warp count in the same bank
    u32 changed[256], sampled[256];
};

template <int SIZE>
__device__ void count(Room& room, const u8* chunk, const u8* base, u64 bytes, int layout) {
    for (u64 first = 16 * threadIdx.x; first < bytes; first += 16 * THREADS * UNROLL) {
        uint4 before[UNROLL], after[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const u64 at = first + 16 * THREADS * i;
            if (at >= bytes) continue;
            before[i] = load_upto16(base + at, bytes - at);
            after[i] = load_upto16(chunk + at, bytes - at);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const u64 at = first + 16 * THREADS * i;
            if (at >= bytes) continue;
            const u32 there = bytes - at < 16 ? (u32)(bytes - at) / SIZE : 16 / SIZE;
            const u32 to_sample = (SAMPLED - (u32)(at / SIZE) % SAMPLED) % SAMPLED;
#pragma unroll
            for (u32 k = 0; k < 16 / SIZE; k++) {
                if (k >= there) continue;
                const u64 element = element_of<SIZE>(before[i], k);
                const u32 key = key_of(element, SIZE, layout);
                atomicAdd(&room.members[key][threadIdx.x % 32], 1u);
                if (element != element_of<SIZE>(after[i], k)) atomicAdd(&room.changed[key], 1u);
                if (k == to_sample) atomicAdd(&room.sampled[key], 1u);
            }
        }
    }
}

// groups: (n, GROUPS); counted[i].groups of them are filled.
extern "C" __global__ void __launch_bounds__(THREADS, 2) sparse_count(const u64* chunks, const u64* bases,
                                                                      const u64* elements, const u8* sizes,
                                                                      const u8* layouts, Counted* counted,
                                                                      CountedGroup* groups) {
    __shared__ Room room;
    const u32 i = blockIdx.x;
    for (u32 at = threadIdx.x; at < sizeof(Room) / 4; at += THREADS) ((u32*)&room)[at] = 0;
    __syncthreads();
    const u8 *chunk = (const u8*)chunks[i], *base = (const u8*)bases[i];
    switch (sizes[i]) {
        case 1: count<1>(room, chunk, base, elements[i], layouts[i]); break;
        case 2: count<2>(room, chunk, base, 2 * elements[i], layouts[i]); break;
        case 4: count<4>(room, chunk, base, 4 * elements[i], layouts[i]); break;
        case 8: count<8>(room, chunk, base, 8 * elements[i], layouts[i]); break;
    }
    __syncthreads();
    u32* const members = room.members[threadIdx.x % 256];  // of a key
    u32 sum = 0;
    for (u32 lane = 0; lane < 32; lane++) sum += members[(threadIdx.x + lane) % 32];
    __syncthreads();
    members[0] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    Counted found = {0, 0, 0, 0};
    for (u32 key = 0; key < 256; key++) found.changed += room.changed[key];
    u32 own = 0, all = 0, seen = 0, left = found.changed;
    const auto end_group = [&](u32 last_key) {
        const bool dense = own > DENSE_ABOVE_SHARE * all;
        groups[(u64)GROUPS * i + found.groups++] = {found.listed, own, all, (u8)last_key, dense, {0, 0}};
        found.listed += dense ? all : own;
        own = all = seen = 0;
    };
    for (u32 key = 0; key < 256; key++) {
        const bool alone = room.sampled[key] * SAMPLED > ALONE_ABOVE;
        if (alone && seen) end_group(key - 1);
        own += room.changed[key];
        all += room.members[key][0];
        seen += room.sampled[key];
        left -= room.changed[key];
        if (key == 255 || alone || (own >= MIN_GROUP && left >= MIN_GROUP)) end_group(key);
    }
    counted[i] = found;
}
