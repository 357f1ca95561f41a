// Apply sparse deltas of any number of groups to their plain bases, in place; sparse_apply.cu is faster for few groups.
//
// One thread block per blob: grid (n), block (THREADS). It takes the base tile by tile: each tile's elements are sorted
// by group, and by position within a group; the changed elements of a group are then those at its next ranks.

#define STEPS 16  // elements of one thread in a tile
#define TILE (THREADS * STEPS)

struct Room {
    u8 group_of[256];                     // a key
    unsigned short counts[WARPS][GROUPS]; // of a tile's elements: by each warp; then by the warps before it
    unsigned short totals[GROUPS];        // by all warps
    unsigned short starts[GROUPS + 1];    // in `order`
    unsigned short order[TILE];           // elements of the tile, sorted
    u32 seen[GROUPS];                     // elements of the group in the tiles before
    u32 applied[GROUPS];                  // changes of the group that were applied
};

// Sort a tile by group: order[starts[g] + r] is the r-th element of group g.
__device__ void sort_tile(Room& room, const Blob& blob, u64 first, int bits) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, before = (1u << lane) - 1;
    const u8* base = (const u8*)blob.out;
    const int size = blob.element_size;
    for (u32 i = threadIdx.x; i < WARPS * blob.groups; i += THREADS) room.counts[i % WARPS][i / WARPS] = 0;
    u32 found[STEPS];  // keys; then group and rank within the warp
    const u32 own = warp * 32 * STEPS + lane;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const u64 at = first + own + 32 * i;
        found[i] = at < blob.elements ? key_of(load_element(base + at * size, size), size, blob.layout) : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const u32 group = room.group_of[found[i]];
        const bool there = first + own + 32 * i < blob.elements;
        const u32 same = same_number(group, bits, there), earlier = __popc(same & before);
        const u32 count = room.counts[warp][group];
        __syncwarp();
        if (there && !earlier) room.counts[warp][group] = (unsigned short)(count + __popc(same));
        __syncwarp();
        found[i] = group << 16 | (count + earlier);
    }
    __syncthreads();
    for (u32 g = threadIdx.x; g < blob.groups; g += THREADS) {
        u32 sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const u32 count = room.counts[w][g];
            room.counts[w][g] = (unsigned short)sum;
            sum += count;
        }
        room.totals[g] = (unsigned short)sum;
    }
    __syncthreads();
    if (warp == 0) {
        u32 sum = 0;
        for (u32 g = 0; g < blob.groups; g += 32) {
            const u32 total = g + lane < blob.groups ? room.totals[g + lane] : 0;
            u32 up_to = total;
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(ALL, up_to, step);
                if (lane >= step) up_to += other;
            }
            if (g + lane < blob.groups) room.starts[g + lane] = (unsigned short)(sum + up_to - total);
            sum += __shfl_sync(ALL, up_to, 31);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const u32 group = found[i] >> 16, rank = found[i] & 0xFFFF;
        if (first + own + 32 * i < blob.elements)
            room.order[room.starts[group] + room.counts[warp][group] + rank] = (unsigned short)(own + 32 * i);
    }
    __syncthreads();
}

// Apply the changes of one group in a tile, by one warp.
__device__ void apply_group(Room& room, const Blob& blob, const Group& group, u32 g, u64 first) {
    const u32 lane = threadIdx.x % 32, seen = room.seen[g], total = room.totals[g];
    const bool dense = group.gap_shift == DENSE;
    const u32 count = dense ? group.value_count : group.gaps;
    const int size = blob.element_size;
    u32 next = room.applied[g], here = ALL;
    while (here == ALL) {
        const u32 i = next + lane;
        u32 rank = 0;
        u64 zigzag = 0;
        bool mine = i < count;
        if (mine) {
            rank = (dense ? i : ((const u32*)group.ranks)[i]) - seen;
            zigzag = load_element((const u8*)group.zigzag + (u64)i * size, size);
            mine = rank < total;
        }
        if (mine) {
            u8* element = (u8*)blob.out + (first + room.order[room.starts[g] + rank]) * size;
            store_element(element, load_element(element, size) + Elements<8>::unzigzag(zigzag), size);
        }
        here = __ballot_sync(ALL, mine);
        next += __popc(here);
    }
    __syncwarp();
    if (lane == 0) {
        room.applied[g] = next;
        room.seen[g] = seen + total;
    }
}

__device__ void apply(Room& room, const Blob& blob, const Group* groups, u32* bad) {
    const int bits = bits_of(blob.groups);
    for (u64 first = 0; first < blob.elements; first += TILE) {
        sort_tile(room, blob, first, bits);
        for (u32 g = threadIdx.x / 32; g < blob.groups; g += WARPS)
            apply_group(room, blob, groups[g], g, first);
        __syncthreads();
    }
    for (u32 g = threadIdx.x; g < blob.groups; g += THREADS) {
        const bool dense = groups[g].gap_shift == DENSE;
        if (room.applied[g] != (dense ? groups[g].value_count : groups[g].gaps)) *bad = 1;
        if (dense && room.seen[g] != groups[g].value_count) *bad = 1;
    }
}

// which: the blobs to apply, one of each chunk.
extern "C" __global__ void __launch_bounds__(THREADS, 2) sparse_apply_any(const Blob* blobs, const Group* groups, const u32* which, u32* bad) {
    __shared__ Room room;
    const Blob blob = blobs[which[blockIdx.x]];
    bad += which[blockIdx.x];
    if (*bad) return;
    groups += blob.first_group;
    for (u32 g = threadIdx.x; g < blob.groups; g += THREADS) {
        room.seen[g] = room.applied[g] = 0;
        for (u32 key = g ? groups[g - 1].last_key + 1 : 0; key <= groups[g].last_key; key++) room.group_of[key] = g;
    }
    __syncthreads();
    apply(room, blob, groups, bad);
}
