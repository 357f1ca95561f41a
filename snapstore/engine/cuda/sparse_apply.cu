// Apply sparse deltas of few groups to their plain bases, in place: add the difference of each changed element, which
// its group and its rank within the group name.
//
// One thread block per blob: grid (n), block (THREADS). It takes the base tile by tile. Each thread counts the elements
// of each group among PER_THREAD neighbours, all groups at once in the bytes of a few words. Sums over the threads give
// the ranks at which each thread's elements begin; so a changed element is found by two searches, and among PER_THREAD
// elements.

#define PER_THREAD 16
#define TILE (THREADS * PER_THREAD)
#define FEW 24       // groups
#define PAIRS 12     // of groups: two sums lie in a word
#define LISTED 512   // changes that are applied at a time
#define AHEAD 2      // changes that each lane reads at once

struct Changes {  // of a group
    const u32* ranks;  // null for a dense one
    const u8* zigzag;
    u32 count;
};

struct Room {
    uint4 one[256];                // 1 in the byte of the group of a key, for groups 0 to 15
    uint2 beyond[256];             // the same, for groups 16 to 23
    Changes changes[FEW];
    u32 before[PAIRS][THREADS];    // of the groups 2k and 2k + 1 << 16: elements of the warp's threads before
    u32 warps[PAIRS][WARPS];       // the same, of the tile's warps before
    u32 totals[FEW];               // of the tile
    u32 seen[FEW], applied[FEW];   // elements of the tiles before, and changes of the group that were applied
    uint4 keys[THREADS];           // of each thread's elements
    u8 first_key[FEW], last_key[FEW];
    unsigned short listed_rank[LISTED], listed_group[LISTED];
    u64 listed_zigzag[LISTED];
    u32 count, more;               // of the list
};

template <int SIZE>
struct Tile {
    static constexpr int PARTS = PER_THREAD * SIZE / 16, PER_PART = 16 / SIZE;
    uint4 parts[PARTS];  // the thread's elements

    __device__ __forceinline__ void load(const Blob& blob, u64 first) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const u64 at = first + threadIdx.x * PER_THREAD + i * PER_PART;
            parts[i] = make_uint4(0, 0, 0, 0);
            if (at < blob.elements) parts[i] = load_upto16((const u8*)blob.out + at * SIZE, (blob.elements - at) * SIZE);
        }
    }
    __device__ __forceinline__ u32 key(int i, int layout) const {  // of an element
        if (!layout) return 0;
        const uint4 v = parts[i / PER_PART];
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        const int byte = i % PER_PART * SIZE;
        const u32 word = words[SIZE == 8 ? byte / 4 + 1 : byte / 4];  // it holds the highest bits
        if (SIZE >= 4) return word >> 23 & 255;
        const u32 element = word >> (8 * (byte % 4));
        return (SIZE == 2 ? element >> 7 : element << 1 | (element >> 7 & 1)) & 255;
    }
};

// Count the elements of a thread: the bytes of a few words, and the sums over the warp's threads up to this one.
template <int SIZE>
__device__ __forceinline__ void count_tile(Room& room, const Blob& blob, const Tile<SIZE>& tile, u64 first) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 own = first + threadIdx.x * PER_THREAD;
    const u32 there = own >= blob.elements ? 0 : blob.elements - own < PER_THREAD ? (u32)(blob.elements - own) : PER_THREAD;
    const int words = blob.groups > 16 ? 6 : 4;
    u32 bytes[6] = {0, 0, 0, 0, 0, 0}, keys[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const u32 key = tile.key(i, blob.layout);
        keys[i / 4] |= key << (8 * (i % 4));
        if (i >= there) continue;
        const uint4 one = room.one[key];
        bytes[0] += one.x;
        bytes[1] += one.y;
        bytes[2] += one.z;
        bytes[3] += one.w;
        if (words == 4) continue;
        const uint2 beyond = room.beyond[key];
        bytes[4] += beyond.x;
        bytes[5] += beyond.y;
    }
    room.keys[threadIdx.x] = make_uint4(keys[0], keys[1], keys[2], keys[3]);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        if (pair >= 2 * words) break;
        // two bytes become two halves of a word
        const u32 own_counts = __byte_perm(bytes[pair / 2], 0, pair % 2 ? 0x4342 : 0x4140);
        u32 sum = own_counts;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(ALL, sum, step);
            if (lane >= step) sum += other;
        }
        room.before[pair][threadIdx.x] = sum - own_counts;
        if (lane == 31) room.warps[pair][warp] = sum;
    }
}

// Sum up the counts of the warps.
__device__ __forceinline__ void sum_warps(Room& room, u32 groups) {
    const u32 pair = threadIdx.x / WARPS, warp = threadIdx.x % WARPS;
    if (pair >= (groups > 16 ? PAIRS : 8)) return;  // whole warps
    const u32 own = room.warps[pair][warp];
    u32 sum = own;
#pragma unroll
    for (u32 step = 1; step < WARPS; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, sum, step);
        if (warp >= step) sum += other;
    }
    room.warps[pair][warp] = sum - own;
    if (warp == WARPS - 1) {
        room.totals[2 * pair] = sum & 0xFFFF;
        room.totals[2 * pair + 1] = sum >> 16;
    }
}

// List the next changes of a group that lie in the tile, as far as there is room, by one warp.
__device__ __forceinline__ void list_group(Room& room, u32 g, int size) {
    const u32 lane = threadIdx.x % 32, seen = room.seen[g], total = room.totals[g];
    const Changes changes = room.changes[g];
    u32 next = room.applied[g], here = ALL, listed = 32;
    while (here == ALL && listed == 32) {
        u32 ranks[AHEAD];
        u64 zigzags[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const u32 i = next + 32 * k + lane;
            ranks[k] = i >= changes.count ? ALL : (changes.ranks ? changes.ranks[i] : i) - seen;
            zigzags[k] = i >= changes.count ? 0 : load_element(changes.zigzag + (u64)i * size, size);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (here != ALL || listed != 32) continue;
            here = __ballot_sync(ALL, ranks[k] < total);
            u32 at = 0;
            if (lane == 0) at = atomicAdd(&room.count, (u32)__popc(here));
            at = __shfl_sync(ALL, at, 0);
            // ranks ascend: the lanes that are here come first
            const u32 left = at < LISTED ? LISTED - at : 0, mine = __popc(here);
            listed = mine < left ? mine : left;
            if (lane < listed) {
                room.listed_rank[at + lane] = (unsigned short)ranks[k];
                room.listed_group[at + lane] = (unsigned short)g;
                room.listed_zigzag[at + lane] = zigzags[k];
            }
            next += listed;
            if (listed < mine && lane == 0) room.more = 1;
        }
    }
    __syncwarp();
    if (lane == 0) room.applied[g] = next;
}

// Add a change to its element.
template <int SIZE>
__device__ __forceinline__ void apply_change(Room& room, const Blob& blob, u64 first, u32 number) {
    const u32 g = room.listed_group[number], half = g % 2 * 16;
    u32 rank = room.listed_rank[number], warp = 0, thread = 0;
    const u32 *warps = room.warps[g / 2], *before = room.before[g / 2];
#pragma unroll
    for (u32 step = WARPS / 2; step; step /= 2)
        if ((warps[warp + step] >> half & 0xFFFF) <= rank) warp += step;
    rank -= warps[warp] >> half & 0xFFFF;
    before += 32 * warp;
#pragma unroll
    for (u32 step = 16; step; step /= 2)
        if ((before[thread + step] >> half & 0xFFFF) <= rank) thread += step;
    rank -= before[thread] >> half & 0xFFFF;
    thread += 32 * warp;
    const uint4 keys = room.keys[thread];
    const u32 words[4] = {keys.x, keys.y, keys.z, keys.w};
    const u32 low = room.first_key[g], span = room.last_key[g] - low;
    u32 members = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) members |= (u32)((words[i / 4] >> (8 * (i % 4)) & 255) - low <= span) << i;
    for (; rank; rank--) members &= members - 1;
    u8* element = (u8*)blob.out + (first + thread * PER_THREAD + __ffs(members) - 1) * SIZE;
    const u64 zigzag = room.listed_zigzag[number];
    store_element(element, load_element(element, SIZE) + Elements<8>::unzigzag(zigzag), SIZE);
}

template <int SIZE>
__device__ void apply(Room& room, const Blob& blob, u32* bad) {
    Tile<SIZE> tile;
    tile.load(blob, 0);
    for (u64 first = 0; first < blob.elements; first += TILE) {
        count_tile<SIZE>(room, blob, tile, first);
        __syncthreads();
        tile.load(blob, first + TILE);  // it arrives while this one is changed
        sum_warps(room, blob.groups);
        for (bool more = true; more;) {
            if (threadIdx.x == 0) room.count = room.more = 0;
            __syncthreads();
            for (u32 g = threadIdx.x / 32; g < blob.groups; g += WARPS) list_group(room, g, SIZE);
            __syncthreads();
            const u32 count = room.count < LISTED ? room.count : LISTED;
            more = room.more;
            for (u32 i = threadIdx.x; i < count; i += THREADS) apply_change<SIZE>(room, blob, first, i);
            __syncthreads();
        }
        if (threadIdx.x < blob.groups) room.seen[threadIdx.x] += room.totals[threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x >= blob.groups) return;
    const Changes changes = room.changes[threadIdx.x];
    const bool complete = changes.ranks || room.seen[threadIdx.x] == changes.count;  // a dense one names all elements
    if (room.applied[threadIdx.x] != changes.count || !complete) *bad = 1;
}

// which: the blobs to apply, one of each chunk, of FEW groups at most.
extern "C" __global__ void __launch_bounds__(THREADS, 2) sparse_apply(const Blob* blobs, const Group* groups,
                                                                      const u32* which, u32* bad) {
    __shared__ Room room;
    const Blob blob = blobs[which[blockIdx.x]];
    bad += which[blockIdx.x];
    if (*bad) return;
    groups += blob.first_group;
    if (threadIdx.x < blob.groups) {
        const u32 g = threadIdx.x, first = g ? groups[g - 1].last_key + 1 : 0, last = groups[g].last_key;
        room.seen[g] = room.applied[g] = 0;
        room.first_key[g] = (u8)first;
        room.last_key[g] = (u8)last;
        const bool dense = groups[g].gap_shift == DENSE;
        room.changes[g] = {dense ? nullptr : (const u32*)groups[g].ranks, (const u8*)groups[g].zigzag,
                           dense ? groups[g].value_count : groups[g].gaps};
        u32 words[6];
        for (u32 word = 0; word < 6; word++) words[word] = g / 4 == word ? 1u << (8 * (g % 4)) : 0;
        for (u32 key = first; key <= last; key++) {
            room.one[key] = make_uint4(words[0], words[1], words[2], words[3]);
            room.beyond[key] = make_uint2(words[4], words[5]);
        }
    }
    __syncthreads();
    switch (blob.element_size) {
        case 1: apply<1>(room, blob, bad); break;
        case 2: apply<2>(room, blob, bad); break;
        case 4: apply<4>(room, blob, bad); break;
        case 8: apply<8>(room, blob, bad); break;
    }
}
