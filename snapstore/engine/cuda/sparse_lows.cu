// Compute the sizes of the low parts of each group of sparse deltas, from the decoded symbols.
//
// One thread block per group: grid (n), block (GROUP_THREADS).

// Count the symbols that are at least `least`.
__device__ __noinline__ u32 count_escapes(const u8* symbols, u32 count, u32 least) {
    u64 own = 0, total;
    for (u32 i = threadIdx.x; i < count; i += GROUP_THREADS) own += symbols[i] >= least;
    scan<GROUP_THREADS>(own, total);
    return (u32)total;
}

extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 8) sparse_lows(const Blob* blobs, const Group* groups, Low* lows) {
    const Group group = groups[blockIdx.x];
    Low low = {0, 0, 0};
    if (group.gap_shift != DENSE) {
        low.gaps = count_escapes((const u8*)group.symbols, group.gaps, 3 * GAP_ESCAPE);
        low.bytes = ((u64)group.gaps * group.gap_shift + 7) / 8 + 4 * (u64)low.gaps;
    }
    low.values = count_escapes((const u8*)group.values, group.value_count, VALUE_ESCAPE);
    low.bytes += (u64)group.value_count * (group.value_shift / 8) + (u64)low.values * blobs[group.blob].element_size;
    if (threadIdx.x == 0) lows[blockIdx.x] = low;
}
