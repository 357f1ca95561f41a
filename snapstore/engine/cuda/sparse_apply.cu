// Apply sparse deltas to a plain base, all consecutive sparse links of a chain at once: add the difference of each
// changed element, which is identified by its group and its rank within the group.
//
// One thread block per chunk, or several: grid (n), block (THREADS). A block reads a tile of the base into shared
// memory, adds the changes of every link that lie in the tile, the oldest link first, and writes the tile. If four
// blocks share a chunk, each takes every fourth tile. A block must know how many elements and changes of each group the
// previous tiles have. The block of the previous tile writes that to `progress` of the group, link by link, and is one
// link ahead. Blocks take work in the order in which they begin, and few share a chunk: each block begins soon enough.
//
// A class is a range of keys; every group consists of whole classes. Elements are counted by class, once per tile. Each
// thread counts its consecutive elements, in the bytes of a few words. Sums over threads give the ranks at which each
// thread's elements begin. So a changed element is found by a search over threads, then among one thread's elements. A
// change that moves an element to another class corrects the sums. Links that together make too many classes are
// applied separately; a link of more than CLASSES groups takes several turns, each with its own counts.

// TILE_BYTES: 32 KiB, or 16 KiB on a device with less shared memory (kernels.py)
// ELEMENT_SIZE: of all chunks of a launch [bytes]
#define PARTS (TILE_BYTES / THREADS / 16)  // parts of 16 bytes that a thread has of a tile
#define MOST_ELEMENTS (8 * PARTS)          // the most elements that a thread has of a tile
#define CLASS_WORDS (2 * PARTS)            // words for the classes of a thread's elements, a byte each
#define CLASSES 24         // the most classes at a time
#define WORDS (CLASSES / 4)
#define NO_CLASS 127
#define SEGMENT 8          // threads of a segment
#define SEGMENTS (THREADS / SEGMENT)
#define MOVES 64           // elements that change their class in a link; if more do, all are counted again
#define AHEAD 2            // changes that a lane reads at once
#define LISTED (PARTS == 4 ? 5120 : 1024)  // changes in the list of a turn, which all threads apply; see `most_listed`
#define PIECE 256          // changes of a group in a tile, on average: if there are more, several warps list them
#define STREAMS 512        // the most groups of all links that are applied together
#define MOST_POLLS (1u << 23)  // each takes about a microsecond
#define PROGRESS_BITS 25   // for a number of elements in `Group.progress`; a chunk has at most 2^24

// How many elements and changes of a group the previous tiles have.
__device__ __forceinline__ u32 seen_of(u64 progress) { return progress >> PROGRESS_BITS & ((1u << PROGRESS_BITS) - 1); }
__device__ __forceinline__ u32 applied_of(u64 progress) { return progress & ((1u << PROGRESS_BITS) - 1); }

// Consecutive sparse deltas of a chunk: addresses of the base and of the chunk's memory, which may be equal.
struct Chain {
    u64 base, out;
    u32 oldest, links;  // blobs oldest, oldest - 1, ...
    u32 block, blocks;  // the number of this thread block, and how many share the chunk
};

// Links that are applied together, in one turn each, the oldest first; or one link, in turns of CLASSES groups.
struct Pass {
    const Blob* oldest;  // newer links lie before it
    Group* groups;
    u64 base, out, bytes;
    u32 turns, blocks;
    int layout;
    bool in_turns;  // one link of several turns
};

// The changes of a group. seen, applied: elements and changes in the previous tiles. pieces: how many warps list them.
struct Stream {
    u64 ranks;  // the address of the ranks; the differences follow
    u32 count, seen, applied;
    u8 first_class, last_class, pieces;
    bool dense;

    __device__ __forceinline__ u64 zigzags() const { return ranks + (dense ? 0 : (4 * (u64)count + 7) / 8 * 8); }
};

struct Room {
    Pass pass;
    bool lost;  // a wait for another block has timed out
    uint4 data[THREADS * PARTS];     // the tile
    uint4 classes[CLASS_WORDS / 4][THREADS];  // of each thread's elements; see `count`
    u32 before[WORDS][THREADS];      // four classes, a byte each: elements of earlier threads of the segment
    u32 segments[2 * WORDS][SEGMENTS];  // two classes, a half word each: elements of earlier segments
    u32 totals[2 * WORDS];           // the same: elements of the tile
    u8 class_of[256];                // by key
    u32 ends[8];                     // bit k: key k is the last of its class
    Stream streams[STREAMS];         // of all turns; if one link takes several turns, of the current turn
    unsigned short starts[STREAMS + 1];  // the first stream of each turn
    u32 found[CLASSES], members[CLASSES];  // changes and elements in the tile, of each group of a turn
    u32 moved[2], moves[MOVES];      // place in `classes` | thread << 5 | old class << 16 | new class << 24
    u32 listed;                      // number of changes; those above `most_listed` are not in the list
    u32 list[LISTED];                // rank in the tile | the group's first class << 16 | its last class << 24
    u64 zigzags[LISTED / 4];         // differences of the listed changes, each of the element size
};
static_assert(sizeof(Room) <= (PARTS == 4 ? 112 : 60) * 1024, "APPLY_SHARED_BYTES in kernels.py");
#ifdef __CUDA_ARCH__
extern __shared__ uint4 dynamic[];  // dynamic, as static shared memory is limited to 48 KiB
#define room (*(Room*)dynamic)
#else
__shared__ Room room;
#endif

// The groups of a turn: the index of the first one in the table and in `streams`, and their number.
struct Turn {
    u32 first, stream, count;

    __device__ __forceinline__ explicit Turn(u32 number) {
        const Pass& pass = room.pass;
        const Blob& blob = *(pass.in_turns ? pass.oldest : pass.oldest - number);
        const u32 skipped = pass.in_turns ? number * CLASSES : 0, left = blob.groups - skipped;
        first = blob.first_group + skipped;
        stream = pass.in_turns ? 0 : room.starts[number];
        count = left < CLASSES ? left : CLASSES;
    }
};

// The place of a class's counts: one byte of a word of `before`, and one half of a word of `segments` and `totals`.
__device__ __forceinline__ u32 word_of(u32 c) { return c / 8 * 2 + c % 2; }
__device__ __forceinline__ u32 byte_of(u32 c) { return c / 2 % 4; }
__device__ __forceinline__ u32 pair_of(u32 c) { return 2 * word_of(c) + byte_of(c) % 2; }
__device__ __forceinline__ u32 half_of(u32 c) { return byte_of(c) / 2 * 16; }

// The classes of a group.
struct Span {
    u32 first, last;

    __device__ __forceinline__ u32 in_segments(u32 segment) const {
        u32 sum = room.segments[pair_of(first)][segment] >> half_of(first) & 0xFFFF;
        for (u32 c = first + 1; c <= last; c++) sum += room.segments[pair_of(c)][segment] >> half_of(c) & 0xFFFF;
        return sum;
    }
    __device__ __forceinline__ u32 in_threads(u32 thread) const {
        u32 sum = room.before[word_of(first)][thread] >> (8 * byte_of(first)) & 255;
        for (u32 c = first + 1; c <= last; c++) sum += room.before[word_of(c)][thread] >> (8 * byte_of(c)) & 255;
        return sum;
    }
    __device__ __forceinline__ u32 total() const {
        u32 sum = 0;
        for (u32 c = first; c <= last; c++) sum += room.totals[pair_of(c)] >> half_of(c) & 0xFFFF;
        return sum;
    }
};

// A thread's elements.
template <int SIZE>
struct Own {
    static constexpr int COUNT = SIZE == 1 ? MOST_ELEMENTS : PARTS * 16 / SIZE, BYTES = COUNT * SIZE;
    static constexpr u64 TILE = THREADS * BYTES;
    uint4 parts[PARTS];

    // Load them from memory; `left`: bytes from the start of the tile to the end of the chunk.
    __device__ __forceinline__ void load(const u8* tile, u64 left) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            const u64 at = threadIdx.x * BYTES + 16 * i;
            parts[i] = at < left ? load_upto16(tile + at, left - at) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void store(u8* tile, u64 left) const {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) {
            const u64 at = threadIdx.x * BYTES + 16 * i;
            if (at < left) store_upto16(tile + at, parts[i], left - at);
        }
    }
    __device__ __forceinline__ void read() {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) parts[i] = room.data[threadIdx.x * (BYTES / 16) + i];
    }
    __device__ __forceinline__ void write() const {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) room.data[threadIdx.x * (BYTES / 16) + i] = parts[i];
    }
    __device__ __forceinline__ u32 key(int i, int layout) const {  // of an element
        return key_of(element_of<SIZE>(parts[i * SIZE / 16], i % (16 / SIZE)), SIZE, layout);
    }
};

// Count each thread's elements by class, then sum up the earlier threads of its segment. `left`: as in `load`.
template <int SIZE>
__device__ __forceinline__ void count(const Own<SIZE>& own, u64 left, int layout) {
    const u64 from = threadIdx.x * Own<SIZE>::BYTES;
    const u32 there = from >= left ? 0 : left - from < Own<SIZE>::BYTES ? (u32)(left - from) / SIZE : MOST_ELEMENTS;
    u32 classes[CLASS_WORDS] = {}, bytes[WORDS] = {}, nibbles[WORDS / 2] = {};
#pragma unroll
    for (int i = 0; i < MOST_ELEMENTS; i++) {
        const u32 c = i < Own<SIZE>::COUNT && i < there ? room.class_of[own.key(i, layout)] : NO_CLASS;
        classes[i % CLASS_WORDS] |= c << (i / CLASS_WORDS * 8);  // the order that `change` expects
#pragma unroll
        for (u32 k = 0; k < WORDS / 2; k++) nibbles[k] += c / 8 == k ? 1u << (c % 8 * 4) : 0;
        if (i % 8 != 7) continue;  // a nibble holds eight
#pragma unroll
        for (int k = 0; k < WORDS / 2; k++) {
            bytes[2 * k] += nibbles[k] & 0x0F0F0F0F;
            bytes[2 * k + 1] += nibbles[k] >> 4 & 0x0F0F0F0F;
            nibbles[k] = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < CLASS_WORDS / 4; i++)
        room.classes[i][threadIdx.x] = make_uint4(classes[4 * i], classes[4 * i + 1], classes[4 * i + 2], classes[4 * i + 3]);
    const u32 number = threadIdx.x % SEGMENT;
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
        u32 sum = __shfl_up_sync(ALL, bytes[k], 1);
        if (number == 0) sum = 0;  // the sum of all 8 threads may not fit into a byte, the sum of 7 does
#pragma unroll
        for (u32 step = 1; step < SEGMENT; step *= 2) {
            const u32 other = __shfl_up_sync(ALL, sum, step);
            if (number >= step) sum += other;
        }
        room.before[k][threadIdx.x] = sum;
        if (number < SEGMENT - 1) continue;
        room.segments[2 * k][threadIdx.x / SEGMENT] = (sum & 0x00FF00FF) + (bytes[k] & 0x00FF00FF);
        room.segments[2 * k + 1][threadIdx.x / SEGMENT] = (sum >> 8 & 0x00FF00FF) + (bytes[k] >> 8 & 0x00FF00FF);
    }
}

// Sum up the counts of earlier segments; each warp sums two classes.
__device__ __forceinline__ void sum_segments() {
    const u32 pair = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pair >= 2 * WORDS) return;
    const u32 first = room.segments[pair][2 * lane], second = room.segments[pair][2 * lane + 1];
    u32 sum = first + second;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    room.segments[pair][2 * lane] = sum - first - second;
    room.segments[pair][2 * lane + 1] = sum - second;
    if (lane == 31) room.totals[pair] = sum;
}

// The next changes of a group, for one lane.
template <int SIZE>
struct Next {
    u32 ranks[AHEAD];  // ALL: no change
    typename Elements<SIZE>::Word zigzags[AHEAD];

    __device__ __forceinline__ void load(const Stream& stream, u32 first, u32 stride) {
        const u32* ranks_at = (const u32*)stream.ranks;
        const u8* zigzags_at = (const u8*)stream.zigzags();
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const u32 i = first + k * stride;
            ranks[k] = i >= stream.count ? ALL : stream.dense ? i : ranks_at[i];
            zigzags[k] = i >= stream.count ? 0 : load_aligned<SIZE>(zigzags_at + (u64)i * SIZE);
        }
    }
};

// The work of a warp in a turn: pieces of groups. A run is 32 consecutive changes of a group. If a group has n pieces,
// each piece has every n-th run.
struct Pieces {
    u32 begin, end;  // the pieces of the group whose number is the lane's, among those of all groups
    u32 group, number, count;

    __device__ __forceinline__ Pieces(const Stream* streams, u32 groups) {
        const u32 lane = threadIdx.x % 32, own = lane < groups ? streams[lane].pieces : 0;
        end = lane < groups ? lane + 1 : groups;
        if (__ballot_sync(ALL, own > 1)) {
            end = own;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(ALL, end, step);
                if (lane >= step) end += other;
            }
        }
        begin = end - own;
    }
    __device__ __forceinline__ u32 all() const { return __shfl_sync(ALL, end, 31); }
    __device__ __forceinline__ void choose(u32 piece) {
        group = __popc(__ballot_sync(ALL, end <= piece));
        number = piece - __shfl_sync(ALL, begin, group);
        count = __shfl_sync(ALL, end - begin, group);
    }
};

// Begin to load the changes that this warp will list first in a turn, into L2.
template <int SIZE>
__device__ __forceinline__ void fetch_changes(const Stream* streams, u32 count) {
    Pieces pieces(streams, count);
    if (threadIdx.x / 32 >= pieces.all()) return;
    pieces.choose(threadIdx.x / 32);
    const Stream& stream = streams[pieces.group];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const u32 i = stream.applied + 32 * (pieces.number + k * pieces.count) + threadIdx.x % 32;
        if (i >= stream.count) return;
        if (!stream.dense) prefetch((const u32*)stream.ranks + i);
        prefetch((const u8*)stream.zigzags() + (u64)i * SIZE);
    }
}

// Return the position of the set bit of a mask that has `rank` set bits below it.
__device__ __forceinline__ u32 bit_of_rank(u32 mask, u32 rank) {
    u32 at = 0;
#pragma unroll
    for (u32 step = 16; step; step /= 2) {
        const u32 low = mask & ((1u << step) - 1), count = __popc(low);
        const bool beyond = rank >= count;
        mask = beyond ? mask >> step : low;
        rank -= beyond ? count : 0;
        at += beyond ? step : 0;
    }
    return at;
}

// Add a difference to an element, given by an `item` of `list`; note the element if its class changes.
template <int SIZE>
__device__ __forceinline__ void change(u32 item, u64 zigzag, u32 parity) {
    const Span span = {item >> 16 & 255, item >> 24};
    u32 rank = item & 0xFFFF, segment = 0;
#pragma unroll
    for (u32 step = SEGMENTS / 2; step; step /= 2)
        if (span.in_segments(segment + step) <= rank) segment += step;
    rank -= span.in_segments(segment);
    u32 thread = segment * SEGMENT;
#pragma unroll
    for (u32 step = SEGMENT / 2; step; step /= 2)
        if (span.in_threads(thread + step) <= rank) thread += step;
    rank -= span.in_threads(thread);
    // classes are below 128: bit 7 of each byte shows whether a difference of bytes is negative
    const u32 low = span.first * 0x01010101u, high = span.last * 0x01010101u | 0x80808080u;
    const auto within = [&](u32 word) { return ((word | 0x80808080u) - low) & (high - word) & 0x80808080u; };
    u32 members = 0;
#pragma unroll
    for (int i = 0; i < CLASS_WORDS / 4; i++) {
        const uint4 v = room.classes[i][thread];
        members |= (within(v.x) >> 7 | within(v.y) >> 6 | within(v.z) >> 5 | within(v.w) >> 4) << (4 * i);
    }
    const u32 place = bit_of_rank(members, rank), number = place / 8 * CLASS_WORDS + place % 8;  // see `count`
    u8* element = (u8*)room.data + (thread * Own<SIZE>::COUNT + number) * SIZE;
    const u64 old = load_aligned<SIZE>(element), most = ~0ull >> (64 - 8 * SIZE);
    const u64 now = (old + Elements<8>::unzigzag(zigzag)) & most;
    store_aligned<SIZE>(element, now);
    const u32 from = room.class_of[key_of(old, SIZE, room.pass.layout)];
    const u32 to = room.class_of[key_of(now, SIZE, room.pass.layout)];
    if (from == to) return;
    const u32 at = atomicAdd(&room.moved[parity], 1u);
    if (at < MOVES) room.moves[at] = place | thread << 5 | from << 16 | to << 24;
}

// The same, not inlined, for rare use.
template <int SIZE>
__device__ __noinline__ void change_at_once(u32 item, u64 zigzag, u32 parity) {
    change<SIZE>(item, zigzag, parity);
}

// Return how many changes fit into the list.
template <int SIZE>
__device__ constexpr u32 most_listed() {
    return SIZE <= 2 ? LISTED : LISTED * 2 / SIZE;
}

// List the changes of a turn's groups that lie in the tile.
template <int SIZE>
__device__ __forceinline__ void list_changes(const Stream* streams, u32 count, u32 parity) {
    const u32 lane = threadIdx.x % 32;
    Pieces pieces(streams, count);
    for (u32 piece = threadIdx.x / 32, all = pieces.all(); piece < all; piece += WARPS) {
        pieces.choose(piece);
        const Stream& stream = streams[pieces.group];
        const Span span = {stream.first_class, stream.last_class};
        const u32 total = span.total(), seen = stream.seen, step = 32 * pieces.count;
        u32 i = stream.applied + 32 * pieces.number + lane, here = ALL, found = 0;
        Next<SIZE> next;
        next.load(stream, i, step);
        while (true) {
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (here != ALL) continue;
                const u32 rank = next.ranks[k] - seen;
                here = __ballot_sync(ALL, rank < total);  // ranks ascend: these lanes are the first ones
                const u32 more = __popc(here), item = rank | span.first << 16 | span.last << 24;
                u32 at = 0;
                if (lane == 0 && more) at = atomicAdd(&room.listed, more);
                at = __shfl_sync(ALL, at, 0) + lane;
                found += more;
                if (rank >= total) continue;
                if (at < most_listed<SIZE>()) {
                    room.list[at] = item;
                    store_aligned<SIZE>((u8*)room.zigzags + at * SIZE, next.zigzags[k]);
                } else {
                    change_at_once<SIZE>(item, next.zigzags[k], parity);
                }
            }
            if (here != ALL) break;
            i += AHEAD * step;
            next.load(stream, i, step);
        }
        if (lane) continue;
        atomicAdd(&room.found[pieces.group], found);
        if (pieces.number == 0) room.members[pieces.group] = total;
    }
}

// Write the progress of the groups after a tile. The last threads do it, as they have the fewest changes to apply.
__device__ __forceinline__ void finish_groups(const Turn& turn, u32 tile) {
    const u32 g = THREADS - 1 - threadIdx.x;
    if (g >= turn.count) return;
    Stream& stream = room.streams[turn.stream + g];
    stream.applied += room.found[g];
    stream.seen += room.members[g];
    room.found[g] = 0;
    *(volatile u64*)&room.pass.groups[turn.first + g].progress =
        (u64)(tile + 1) << (2 * PROGRESS_BITS) | (u64)stream.seen << PROGRESS_BITS | stream.applied;
}

// Wait until another block has finished the groups of a turn in the previous tile. The wait has a limit: with wrong
// numbers the chunk gets a wrong digest, and the CPU rebuilds it.
__device__ __forceinline__ void wait_for_groups(const Turn& turn, u32 tile) {
    if (threadIdx.x >= turn.count) return;
    const volatile u64* at = &room.pass.groups[turn.first + threadIdx.x].progress;
    volatile bool& lost = room.lost;
    u64 progress = *at;
    for (u32 polls = 0; progress >> (2 * PROGRESS_BITS) != tile && !lost; progress = *at)
        if (++polls == MOST_POLLS) lost = true;
    Stream& stream = room.streams[turn.stream + threadIdx.x];
    stream.seen = seen_of(progress);
    stream.applied = applied_of(progress);
}

// Load the groups of a turn and their progress; `tiles`: the number of tiles of the chunk.
__device__ __forceinline__ void load_streams(const Turn& turn, u32 tiles) {
    const u32 g = threadIdx.x;
    if (g >= turn.count) return;
    const Group* of_turn = room.pass.groups + turn.first;
    const Group& group = of_turn[g];
    const bool dense = group.gap_shift == DENSE, is_first = turn.first + g == room.pass.oldest->first_group;
    const u32 first_key = g || (room.pass.in_turns && !is_first) ? of_turn[(int)g - 1].last_key + 1 : 0;
    const u32 count = dense ? group.value_count : group.gaps, pieces = 1 + count / (PIECE * tiles + 1);
    const u64 progress = *(const volatile u64*)&group.progress;
    room.streams[turn.stream + g] = {dense ? group.zigzag : group.ranks,
                                     count,
                                     seen_of(progress),
                                     applied_of(progress),
                                     room.class_of[first_key],
                                     room.class_of[group.last_key],
                                     (u8)(pieces < WARPS ? pieces : WARPS),
                                     dense};
}

// Correct the counts for an element whose class has changed. One warp does it.
__device__ __forceinline__ void correct(u32 move) {
    const u32 lane = threadIdx.x % 32, place = move % 32, thread = move >> 5 & (THREADS - 1), segment = thread / SEGMENT;
    const u32 from = move >> 16 & 255, to = move >> 24;
    for (u32 s = lane; s < SEGMENTS; s += 32) {
        if (s <= segment) continue;
        atomicAdd(&room.segments[pair_of(from)][s], 0u - (1u << half_of(from)));
        atomicAdd(&room.segments[pair_of(to)][s], 1u << half_of(to));
    }
    if (lane > thread % SEGMENT && lane < SEGMENT) {
        const u32 other = segment * SEGMENT + lane;
        atomicAdd(&room.before[word_of(from)][other], 0u - (1u << (8 * byte_of(from))));
        atomicAdd(&room.before[word_of(to)][other], 1u << (8 * byte_of(to)));
    }
    if (lane) return;
    atomicAdd(&room.totals[pair_of(from)], 0u - (1u << half_of(from)));
    atomicAdd(&room.totals[pair_of(to)], 1u << half_of(to));
    atomicAdd((u32*)&room.classes[place % 8 / 4][thread] + place % 4, (to - from) << (place / 8 * 8));
}

// Set the class of each key; classes are numbered from the one with number `first`, which becomes 0.
__device__ __forceinline__ void set_classes(u32 first) {
    const u32 key = threadIdx.x;
    if (key >= 256) return;
    u32 c = __popc(room.ends[key / 32] & ((1u << key % 32) - 1)) - first;
    for (u32 word = 0; word < key / 32; word++) c += __popc(room.ends[word]);
    room.class_of[key] = c < CLASSES ? (u8)c : NO_CLASS;
}

// Choose the most links, at least one, that fit CLASSES and STREAMS; set the class of each key; return their number.
__device__ u32 choose_links(const Blob* oldest, const Group* groups, u32 links) {
    u32 chosen = 0, kept = 0, classes = 0, groups_before = 0;
    if (threadIdx.x < 8) room.ends[threadIdx.x] = 0;
    __syncthreads();
    for (; chosen < links && classes <= CLASSES; chosen++) {
        const Blob& blob = *(oldest - chosen);
        if (blob.layout != oldest->layout || (chosen && groups_before + blob.groups > STREAMS)) break;
        const u32 key = threadIdx.x < blob.groups ? groups[blob.first_group + threadIdx.x].last_key : 255;
        atomicOr(&room.ends[key / 32], 1u << key % 32);
        __syncthreads();
        classes = 0;
        for (int word = 0; word < 8; word++) classes += __popc(room.ends[word]);
        const u32 now = room.ends[threadIdx.x % 8];
        __syncthreads();  // from here on other threads may add the next link
        if (classes > CLASSES && chosen) break;
        kept = now;
        if (threadIdx.x == 0) room.starts[chosen] = (unsigned short)groups_before;
        groups_before += blob.groups;
    }
    if (threadIdx.x < 8) room.ends[threadIdx.x] = kept;
    __syncthreads();
    set_classes(0);
    __syncthreads();
    return chosen;
}

// Apply the links of `room.pass` to the tiles of this block; return how many tiles the chunk has.
template <int SIZE>
__device__ u32 apply(u32 own_block) {
    const Pass& pass = room.pass;  // a reference, to save registers
    const u32 tiles = (u32)((pass.bytes + Own<SIZE>::TILE - 1) / Own<SIZE>::TILE);
    for (u32 number = 0; number < pass.turns && !pass.in_turns; number++) load_streams(Turn(number), tiles);
    __syncthreads();
    for (u32 tile = own_block; tile < tiles; tile += pass.blocks) {
        const u64 first = tile * Own<SIZE>::TILE;
        Own<SIZE> own;
        own.load((const u8*)pass.base + first, pass.bytes - first);
        own.write();
        const u64 next = first + pass.blocks * Own<SIZE>::TILE + threadIdx.x * Own<SIZE>::BYTES;
        if (next < pass.bytes) prefetch((const u8*)pass.base + next);
        if (threadIdx.x == 0) room.moved[0] = room.moved[1] = 0;
        bool stale = true;  // the counts must be computed again
        for (u32 number = 0; number < pass.turns; number++) {
            const Turn turn(number);
            Stream* const streams = room.streams + turn.stream;
            if (pass.in_turns) {
                set_classes(number * CLASSES);
                __syncthreads();
                load_streams(turn, tiles);
                __syncthreads();
            }
            if (pass.blocks > 1) {
                wait_for_groups(turn, tile);
                if (!stale) __syncthreads();
            }
            if (stale) {
                if (pass.in_turns)  // the base as it was before all turns
                    own.load((const u8*)pass.base + first, pass.bytes - first);
                else
                    own.read();
                count<SIZE>(own, pass.bytes - first, pass.layout);
                __syncthreads();
                sum_segments();
                __syncthreads();
            }
            list_changes<SIZE>(streams, turn.count, number % 2);
            __syncthreads();
            const bool more = number + 1 < pass.turns;
            if (more && !pass.in_turns) fetch_changes<SIZE>(streams + turn.count, Turn(number + 1).count);
            finish_groups(turn, tile);
            for (u32 i = threadIdx.x; i < room.listed && i < most_listed<SIZE>(); i += THREADS)
                change<SIZE>(room.list[i], load_aligned<SIZE>((const u8*)room.zigzags + i * SIZE), number % 2);
            __syncthreads();
            const u32 moved = room.moved[number % 2];
            stale = pass.in_turns || moved > MOVES;
            if (threadIdx.x == 0) room.moved[(number + 1) % 2] = room.listed = 0;
            if (more && !stale)
                for (u32 i = threadIdx.x / 32; i < moved; i += WARPS) correct(room.moves[i]);
            __syncthreads();
        }
        own.read();
        own.store((u8*)pass.out + first, pass.bytes - first);
        if (!pass.in_turns) fetch_changes<SIZE>(room.streams, Turn(0).count);
    }
    return tiles;
}

// chains: the work of each block; the blocks of a chunk are consecutive. begun: how many blocks have begun; 0 at first.
extern "C" __global__ void __launch_bounds__(THREADS, 2) sparse_apply(const Chain* chains, u32* begun, const Blob* blobs,
                                                                      Group* groups, u32* bad) {
    if (threadIdx.x == 0) room.listed = atomicAdd(begun, 1u);
    __syncthreads();
    const Chain chain = chains[room.listed];
    __syncthreads();
    if (threadIdx.x < CLASSES) room.found[threadIdx.x] = room.listed = 0;
    if (threadIdx.x == 0) room.lost = false;
    __syncthreads();
    for (u32 link = threadIdx.x; link < chain.links; link += THREADS)
        if (bad[chain.oldest - link]) room.listed = 1;
    __syncthreads();
    if (room.listed) return;  // all threads
    u32 tiles = 0;
    for (u32 done = 0, links; done < chain.links; done += links) {
        const Blob* oldest = blobs + chain.oldest - done;
        links = choose_links(oldest, groups, chain.links - done);
        if (threadIdx.x == 0)
            room.pass = {oldest, groups, done ? chain.out : chain.base, chain.out, oldest->elements * oldest->element_size,
                         oldest->groups > CLASSES ? (oldest->groups + CLASSES - 1) / CLASSES : links, chain.blocks,
                         oldest->layout, oldest->groups > CLASSES};
        __syncthreads();
        tiles = apply<ELEMENT_SIZE>(chain.block);
        __syncthreads();
    }
    if ((tiles - 1) % chain.blocks != chain.block) return;  // another block has the last tile
    for (u32 link = 0; link < chain.links; link++) {
        const Blob& blob = blobs[chain.oldest - link];
        if (threadIdx.x >= blob.groups) continue;
        const Group& group = groups[blob.first_group + threadIdx.x];
        const bool dense = group.gap_shift == DENSE;  // then it changes all its elements
        const u32 count = dense ? group.value_count : group.gaps;
        if (applied_of(group.progress) != count || (dense && seen_of(group.progress) != count)) bad[chain.oldest - link] = 1;
    }
}
