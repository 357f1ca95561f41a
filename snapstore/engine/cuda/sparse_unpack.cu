// Unpack sparse deltas (docs/format.md, "Sparse deltas") whose symbols are decoded: the symbols and low parts of each
// group become the ranks of its changed elements within the group, ascending, and their zigzagged differences.
//
// One thread block per group: grid (n), block (GROUP_THREADS). For any content of a blob, nothing is read beyond its
// low parts and its streams, and nothing is written beyond its memory. A contradiction sets bad[blob].

#define ITEMS 4  // that a thread takes at a time

__device__ __forceinline__ u64 little_endian(const u8* p, int count) {
    u64 value = 0;
#pragma unroll 1
    for (int i = 0; i < count; i++) value |= (u64)p[i] << (8 * i);
    return value;
}

// Decode values, add `extra` to each, and write the elements to `out`; `at`: the address of their low parts.
__device__ __noinline__ void unpack_values(const Group& group, u64 at, u8* out, int size, u32 extra, u32* bad) {
    const u8* symbols = (const u8*)group.values;
    const u32 count = group.value_count;
    const int low_bytes = group.value_shift / 8, bits = 8 * size;
    const u64 escapes_at = at + (u64)count * low_bytes, most = bits == 64 ? ~0ull : (1ull << bits) - 1;
    u64 escapes = 0;
    for (u32 first = 0; first < count; first += GROUP_THREADS * ITEMS) {
        const u32 begin = first + ITEMS * threadIdx.x;
        u64 own = 0, total;
        for (u32 i = begin; i < begin + ITEMS && i < count; i++) own += symbols[i] == VALUE_ESCAPE;
        u64 escape = escapes + scan<GROUP_THREADS>(own, total);
        for (u32 i = begin; i < begin + ITEMS && i < count; i++) {
            u64 value = symbols[i];
            if (value == VALUE_ESCAPE) value = little_endian((const u8*)(escapes_at + size * escape++), size);
            if (group.value_shift && value >> (bits - group.value_shift)) *bad = 1;
            value = value << group.value_shift | little_endian((const u8*)at + (u64)i * low_bytes, low_bytes);
            if (value > most - extra) *bad = 1;
            store_element(out + (u64)i * size, value + extra, size);
        }
        escapes += total;
    }
}

// Return integer `index` of a packed array of integers of `bits` bits, whose highest bit comes first.
__device__ __forceinline__ u64 low_bits(const u8* packed, u64 packed_bytes, u64 index, u32 bits) {
    if (!bits) return 0;
    const u64 first = index * bits;
    u64 value = 0;
    for (u64 byte = first / 8; byte < first / 8 + 5; byte++) value = value << 8 | (byte < packed_bytes ? packed[byte] : 0);
    return value >> (40 - first % 8 - bits) & ((1u << bits) - 1);
}

// Decode a group that has gaps; `at`: the address of its low parts.
__device__ void unpack_gaps(const Blob& blob, const Group& group, u64 at, u32 gap_escapes, u32* bad) {
    const u8 *symbols = (const u8*)group.symbols, *low = (const u8*)at;
    const u32 count = group.gaps;
    const int size = blob.element_size;
    const u64 low_bytes = ((u64)count * group.gap_shift + 7) / 8, escapes_at = at + low_bytes;
    unpack_values(group, escapes_at + 4 * (u64)gap_escapes, (u8*)group.found, size, OTHER + 1, bad);
    __syncthreads();  // the values are written
    u64 escapes = 0, others = 0, rank = 0;
    for (u32 first = 0; first < count; first += GROUP_THREADS * ITEMS) {
        const u32 begin = first + ITEMS * threadIdx.x;
        u64 own = 0, total, steps = 0, step[ITEMS];
        for (u32 i = begin; i < begin + ITEMS && i < count; i++)
            own += (symbols[i] / 3 >= GAP_ESCAPE) + ((u64)(symbols[i] % 3 == OTHER) << 32);
        const u64 before = scan<GROUP_THREADS>(own, total);
        u64 escape = escapes + (u32)before, other = others + (before >> 32);
        escapes += (u32)total;
        others += total >> 32;
#pragma unroll
        for (u32 k = 0; k < ITEMS; k++) {
            const u32 i = begin + k;
            step[k] = 0;
            if (i >= count) continue;
            const u32 symbol = symbols[i];
            u64 gap = symbol / 3;
            if (gap >= GAP_ESCAPE) gap = little_endian((const u8*)(escapes_at + 4 * escape++), 4);
            gap = gap << group.gap_shift | low_bits(low, low_bytes, i, group.gap_shift);
            if (symbol > 3 * GAP_ESCAPE + OTHER || gap >= blob.elements) {
                *bad = 1;
                gap = 0;
            }
            u64 zigzag = symbol % 3 + 1;
            if (symbol % 3 == OTHER) {
                if (other < group.value_count)
                    zigzag = load_element((const u8*)group.found + other * size, size);
                else
                    *bad = 1;
                other++;
            }
            store_element((u8*)group.zigzag + (u64)i * size, zigzag, size);
            steps += step[k] = gap + 1;
        }
        u64 next = rank + scan<GROUP_THREADS>(steps, total);  // every step is below 2^33: the sum cannot overflow
        rank += total;
#pragma unroll
        for (u32 k = 0; k < ITEMS; k++) {
            next += step[k];
            if (begin + k < count) ((u32*)group.ranks)[begin + k] = (u32)(next - 1);
        }
    }
    if (rank > blob.elements || others != group.value_count) *bad = 1;
}

// lows: from sparse_lows.cu.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 8) sparse_unpack(const Blob* blobs, const Group* groups,
                                                                       const Low* lows, u32* bad) {
    const Group group = groups[blockIdx.x];
    const Blob blob = blobs[group.blob];
    bad += group.blob;
    u64 own = 0, before;
    for (u32 g = blob.first_group + threadIdx.x; g < blockIdx.x; g += GROUP_THREADS) own += lows[g].bytes;
    scan<GROUP_THREADS>(own, before);
    const Low low = lows[blockIdx.x];
    const u64 at = blob.low + before, end = at + low.bytes;
    const bool last = blockIdx.x + 1 == blob.first_group + blob.groups;
    if (end > blob.low_end || (last && end != blob.low_end)) {
        *bad = 1;
        return;
    }
    if (group.gap_shift == DENSE)
        unpack_values(group, at, (u8*)group.zigzag, blob.element_size, 0, bad);
    else
        unpack_gaps(blob, group, at, low.gaps, bad);
}
