// List the changed elements of chunks group by group: their ranks within the group, ascending, and their zigzagged
// differences. For dense groups, list the differences of all elements. The inverse of sparse_apply.cu.
//
// One thread block per chunk: grid (n), block (THREADS). It reads chunk and base tile by tile.

#define STEPS 8  // elements of one thread in a tile
#define TILE (THREADS * STEPS)

struct Room {
    u8 group_of[256];           // by key
    u8 dense[GROUPS];
    u32 counts[WARPS][GROUPS];  // elements in a tile | changed ones << 16: of each warp, later of all warps before it
    u32 totals[GROUPS];         // the same, of all warps
    u32 first[GROUPS];          // index in the lists
    u32 elements[GROUPS], changed[GROUPS];  // in the previous tiles
};

template <int SIZE>
__device__ void rank_tile(Room& room, const Job& job, u64 start, int bits) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, before = (1u << lane) - 1;
    const u8 *chunk = (const u8*)job.chunk, *base = (const u8*)job.base;
    for (u32 i = threadIdx.x; i < WARPS * job.group_count; i += THREADS) room.counts[i % WARPS][i / WARPS] = 0;
    const u64 own = start + warp * 32 * STEPS + lane;
    u64 zigzag[STEPS];
    u32 group[STEPS], rank[STEPS];  // rank: among elements | among changed ones << 16
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const u64 at = own + 32 * i;
        const u64 prior = at < job.elements ? load_element(base + at * SIZE, SIZE) : 0;
        const u64 state = at < job.elements ? load_element(chunk + at * SIZE, SIZE) : 0;
        zigzag[i] = zigzag_of<SIZE>(state - prior);
        group[i] = room.group_of[key_of(prior, SIZE, job.layout)];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const bool there = own + 32 * i < job.elements;
        const u32 same = same_number(group[i], bits, there), changed = same & __ballot_sync(ALL, zigzag[i] != 0);
        const u32 count = room.counts[warp][group[i]];
        __syncwarp();
        if (there && !(same & before)) room.counts[warp][group[i]] = count + __popc(same) + (__popc(changed) << 16);
        __syncwarp();
        rank[i] = count + __popc(same & before) + (__popc(changed & before) << 16);
    }
    __syncthreads();
    for (u32 g = threadIdx.x; g < job.group_count; g += THREADS) {
        u32 sum = 0;
        for (int w = 0; w < WARPS; w++) {
            const u32 count = room.counts[w][g];
            room.counts[w][g] = sum;
            sum += count;
        }
        room.totals[g] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const u32 g = group[i], earlier = room.counts[warp][g] + rank[i];
        if (own + 32 * i >= job.elements) continue;
        const u32 element = room.elements[g] + (earlier & 0xFFFF), change = room.changed[g] + (earlier >> 16);
        const u64 to = room.first[g] + (room.dense[g] ? element : change);
        if (room.dense[g] || zigzag[i]) store_element((u8*)job.zigzag + to * SIZE, zigzag[i], SIZE);
        if (zigzag[i] && !room.dense[g]) ((u32*)job.ranks)[to] = element;
    }
    __syncthreads();
    for (u32 g = threadIdx.x; g < job.group_count; g += THREADS) {
        room.elements[g] += room.totals[g] & 0xFFFF;
        room.changed[g] += room.totals[g] >> 16;
    }
}

template <int SIZE>
__device__ void rank(Room& room, const Job& job) {
    const int bits = bits_of(job.group_count);
    for (u64 start = 0; start < job.elements; start += TILE) rank_tile<SIZE>(room, job, start, bits);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) sparse_rank(const Job* jobs) {
    __shared__ Room room;
    const Job job = jobs[blockIdx.x];
    const CountedGroup* groups = (const CountedGroup*)job.groups;
    for (u32 g = threadIdx.x; g < job.group_count; g += THREADS) {
        room.elements[g] = room.changed[g] = 0;
        room.first[g] = groups[g].first;
        room.dense[g] = groups[g].dense;
        for (u32 key = g ? groups[g - 1].last_key + 1 : 0; key <= groups[g].last_key; key++) room.group_of[key] = g;
    }
    __syncthreads();
    switch (job.element_size) {
        case 1: rank<1>(room, job); break;
        case 2: rank<2>(room, job); break;
        case 4: rank<4>(room, job); break;
        case 8: rank<8>(room, job); break;
    }
}
