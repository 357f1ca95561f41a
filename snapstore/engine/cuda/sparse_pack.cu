// Pack the changed elements of chunks (sparse_rank.cu) into sparse deltas without frames: symbols of gaps and of
// values, the table of groups, and low parts. The result equals that of format/blobs/codecs/sparse.py.
//
// One thread block per chunk: grid (n), block (THREADS).

#define ITEMS 4  // that a thread takes at a time
#define FRAME_BYTES 20.0
#define SYMBOL_BYTES 0.45
#define CLASSES 65  // lengths in bits, 0 to 64

struct Packed {
    u64 low_bytes;  // ~0: more than there is memory for
};
// The row of a group in the blob.
struct Row {
    u8 last_key, gap_shift, value_shift, ends_frames;
    u32 gaps, values;
};

struct Room {
    u32 counts[CLASSES];  // of numbers, by their length in bits
    u32 own[2][256], joined[2][256];  // histograms of both streams: of a group, and of the run that it may join
    double sums[WARPS];
};

__device__ __forceinline__ u32 bit_length(u64 value) {
    return value >> 32 ? 64 - __clz((u32)(value >> 32)) : 32 - __clz((u32)value);
}

__device__ __forceinline__ void clear_classes(Room& room) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < CLASSES; i += THREADS) room.counts[i] = 0;
    __syncthreads();
}

__device__ __forceinline__ void classify(Room& room, u64 value) {
    atomicAdd(&room.counts[bit_length(value)], 1u);
}

// Return the length in bits of the median of `count` numbers, the greater of two. All threads must call it.
__device__ u32 median_bits(const Room& room, u32 count) {
    __syncthreads();
    if (!count) return 0;
    u32 before = 0, bits = 0;
    while (before + room.counts[bits] <= count / 2) before += room.counts[bits++];
    return bits;
}

__device__ __forceinline__ u64 gap_at(const u32* ranks, u32 i) { return i ? ranks[i] - ranks[i - 1] - 1 : ranks[0]; }

__device__ __forceinline__ void store_little_endian(u8* p, u64 value, int count) {
    for (int i = 0; i < count; i++) p[i] = (u8)(value >> (8 * i));
}

// Write symbols and low parts of the elements at `values`; return the address after them, 0 if they do not fit.
__device__ __noinline__ u64 pack_values(Room& room, const u8* values, u32 count, int size, u8* symbols, u64 at, u64 end,
                                        u8& value_shift) {
    clear_classes(room);
    for (u32 i = threadIdx.x; i < count; i += THREADS) classify(room, load_element(values + (u64)i * size, size));
    const u32 bits = median_bits(room, count);
    const int low_bytes = bits < 9 ? 0 : (bits - 1) / 8 < size - 1 ? (bits - 1) / 8 : size - 1;
    value_shift = 8 * low_bytes;
    u64 escapes = 0, own = 0, total;
    for (u32 i = threadIdx.x; i < count; i += THREADS)
        own += load_element(values + (u64)i * size, size) >> value_shift >= VALUE_ESCAPE;
    scan(own, total);
    const u64 escapes_at = at + (u64)count * low_bytes;
    if (escapes_at + size * total > end) return 0;
    for (u32 first = 0; first < count; first += THREADS * ITEMS) {
        const u32 begin = first + ITEMS * threadIdx.x;
        own = 0;
        for (u32 i = begin; i < begin + ITEMS && i < count; i++)
            own += load_element(values + (u64)i * size, size) >> value_shift >= VALUE_ESCAPE;
        u64 escape = escapes + scan(own, total);
        escapes += total;
        for (u32 i = begin; i < begin + ITEMS && i < count; i++) {
            const u64 value = load_element(values + (u64)i * size, size), quotient = value >> value_shift;
            const u32 symbol = quotient < VALUE_ESCAPE ? (u32)quotient : VALUE_ESCAPE;
            symbols[i] = (u8)symbol;
            atomicAdd(&room.own[1][symbol], 1u);
            store_little_endian((u8*)at + (u64)i * low_bytes, value, low_bytes);
            if (quotient >= VALUE_ESCAPE) store_little_endian((u8*)(escapes_at + size * escape++), quotient, size);
        }
    }
    return escapes_at + size * escapes;
}

// Write symbols and low parts of a group's gaps, then of its values; return the address after them, 0 if they do not
// fit.
__device__ __noinline__ u64 pack_gaps(Room& room, const u32* ranks, const u8* zigzag, u32 count, int size, u8* found,
                                      u8* symbols, u8* values, u64 at, u64 end, Row& row) {
    clear_classes(room);
    for (u32 i = threadIdx.x; i < count; i += THREADS) classify(room, gap_at(ranks, i));
    const u32 bits = median_bits(room, count);
    const u32 shift = bits < 2 ? 0 : bits - 2;
    u64 own = 0, total, escapes = 0, others = 0;
    for (u32 i = threadIdx.x; i < count; i += THREADS) own += gap_at(ranks, i) >> shift >= GAP_ESCAPE;
    scan(own, total);
    const u64 low_bytes = ((u64)count * shift + 7) / 8, escapes_at = at + low_bytes;
    if (escapes_at + 4 * total > end) return 0;
    for (u64 byte = threadIdx.x; byte < low_bytes; byte += THREADS) {
        u32 packed = 0;
        for (u64 bit = 8 * byte; bit < 8 * byte + 8; bit++) {
            const u64 i = bit / shift;
            packed = packed << 1 | (i < count ? gap_at(ranks, (u32)i) >> (shift - 1 - bit % shift) & 1 : 0);
        }
        ((u8*)at)[byte] = (u8)packed;
    }
    for (u32 first = 0; first < count; first += THREADS * ITEMS) {
        const u32 begin = first + ITEMS * threadIdx.x;
        own = 0;
        for (u32 i = begin; i < begin + ITEMS && i < count; i++)
            own += (gap_at(ranks, i) >> shift >= GAP_ESCAPE) +
                   ((u64)(load_element(zigzag + (u64)i * size, size) > OTHER) << 32);
        const u64 before = scan(own, total);
        u64 escape = escapes + (u32)before, other = others + (before >> 32);
        escapes += (u32)total;
        others += total >> 32;
        for (u32 i = begin; i < begin + ITEMS && i < count; i++) {
            const u64 quotient = gap_at(ranks, i) >> shift, z = load_element(zigzag + (u64)i * size, size);
            const u32 symbol = 3 * (quotient < GAP_ESCAPE ? (u32)quotient : GAP_ESCAPE) + (z > OTHER ? OTHER : (u32)z - 1);
            symbols[i] = (u8)symbol;
            atomicAdd(&room.own[0][symbol], 1u);
            if (quotient >= GAP_ESCAPE) store_little_endian((u8*)(escapes_at + 4 * escape++), quotient, 4);
            if (z > OTHER) store_element(found + size * other++, z - OTHER - 1, size);
        }
    }
    row.gap_shift = (u8)shift;
    row.values = (u32)others;
    __syncthreads();  // the values are written
    return pack_values(room, found, row.values, size, values, escapes_at + 4 * escapes, end, row.value_shift);
}

// Return the sum of all threads' values.
__device__ double sum_of(Room& room, double value) {
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room.sums[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < WARPS; i++) sum += room.sums[i];
    return sum;
}

// Estimate the stored bytes of both streams, one frame each, by their histograms.
__device__ __noinline__ double cost(Room& room, const u32 (*one)[256], const u32 (*other)[256]) {
    double sum = 0;
    for (int stream = 0; stream < 2; stream++) {
        u64 found = 0, all;
        double bits = 0;
        for (u32 i = threadIdx.x; i < 256; i += THREADS) {
            const u32 count = one[stream][i] + (other ? other[stream][i] : 0);
            if (count) found += (u64)count << 32 | 1;
            if (count) bits = count * log2((double)count);
        }
        scan(found, all);
        const double total = (double)(all >> 32), distinct = (double)(u32)all;
        bits = sum_of(room, bits);
        if (!(all >> 32)) continue;
        bits = total * log2(total) - bits;
        sum += (distinct > 1 ? (bits > total ? bits : total) / 8 : 0) + FRAME_BYTES + SYMBOL_BYTES * distinct;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) sparse_pack(const Job* jobs, Packed* packed) {
    __shared__ Room room;
    const Job job = jobs[blockIdx.x];
    const CountedGroup* groups = (const CountedGroup*)job.groups;
    Row* rows = (Row*)(job.table + 4);
    u64 at = job.low, end = at + job.low_room, gaps = 0, values = 0;
    double joined_cost = 0;
    if (threadIdx.x == 0) *(u32*)job.table = job.group_count;
    for (u32 g = 0; g < job.group_count && at; g++) {
        const CountedGroup group = groups[g];
        Row row = {group.last_key, DENSE, 0, g + 1 == job.group_count, group.dense ? 0 : group.changed,
                   group.dense ? group.members : 0};
        const u8* zigzag = (const u8*)job.zigzag + (u64)group.first * job.element_size;
        u8 *symbols = (u8*)job.symbols + gaps, *own_values = (u8*)job.values + values;
        for (u32 i = threadIdx.x; i < 512; i += THREADS) room.own[i / 256][i % 256] = 0;
        if (group.dense)
            at = pack_values(room, zigzag, group.members, job.element_size, own_values, at, end, row.value_shift);
        else
            at = pack_gaps(room, (const u32*)job.ranks + group.first, zigzag, group.changed, job.element_size,
                           (u8*)job.found + (u64)group.first * job.element_size, symbols, own_values, at, end, row);
        if (!at) break;
        gaps += row.gaps;
        values += row.values;
        __syncthreads();
        const double own_cost = cost(room, room.own, nullptr), both = g ? cost(room, room.own, room.joined) : 0;
        const bool joins = g && both <= joined_cost + own_cost;
        joined_cost = joins ? both : own_cost;
        __syncthreads();
        for (u32 i = threadIdx.x; i < 512; i += THREADS)
            room.joined[i / 256][i % 256] = room.own[i / 256][i % 256] + (joins ? room.joined[i / 256][i % 256] : 0);
        if (threadIdx.x == 0) {
            if (g && !joins) rows[g - 1].ends_frames = 1;
            rows[g] = row;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) packed[blockIdx.x].low_bytes = at ? at - job.low : ~0ull;
}
