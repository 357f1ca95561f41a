// Read the tables of sparse deltas (docs/format.md, "Sparse deltas"): check them, and find the frames of their streams.
//
// One thread block per blob: grid (n), block (GROUP_THREADS). For any content of a blob, nothing is read beyond it, and
// nothing is written beyond its groups and frames. The memory for the results is not allocated yet: the tables hold
// offsets until sparse_place.cu.

#define EACH (GROUPS / GROUP_THREADS)  // consecutive groups, and runs, of a thread
#define ROW_BYTES 12

// A blob as it is stored: addresses of its payload and of its block lengths; the numbers of groups (0: the declared
// number is not valid) and frames that it declares; and the indices of the first ones.
struct Stored {
    u64 payload, payload_bytes, lengths, elements;
    u32 first_group, groups, first_frame, frames, block_bytes;
    u8 element_size, layout, unused[2];
};
// The needs of a blob: bytes of its decoded streams, and of its changes; how many frames huffman_decode does not read.
struct Needs {
    u64 streams, changes;
    u32 others, fine;
};
// Groups that share streams, one of gaps and one of values. gaps_end, values_end: sums through this run; at: offset of
// its symbols; frames: how many the earlier runs have.
struct Run {
    u64 gaps_end, values_end, at;
    u32 frames;
};

struct Row {
    u8 last_key, gap_shift, value_shift, flags;
    u32 gaps, values;

    __device__ __forceinline__ explicit Row(const u8* p) {
        const uint4 row = load_tail(p, ROW_BYTES);
        last_key = row.x, gap_shift = row.x >> 8, value_shift = row.x >> 16, flags = row.x >> 24;
        gaps = row.y, values = row.z;
    }
    __device__ __forceinline__ bool dense() const { return gap_shift == DENSE; }
    __device__ __forceinline__ u32 changed() const { return dense() ? values : gaps; }
    __device__ __forceinline__ bool wrong(int previous_key, bool is_last, int element_size) const {
        return last_key <= previous_key || flags > ENDS_FRAMES || (is_last && (last_key != 255 || flags != ENDS_FRAMES)) ||
               (dense() ? gaps > 0 : gap_shift > MAX_GAP_SHIFT || values > gaps) || value_shift % 8 ||
               value_shift >= 8 * element_size;
    }
    __device__ __forceinline__ u64 ranks_bytes() const { return dense() ? 0 : (4 * (u64)gaps + 7) / 8 * 8; }
    __device__ __forceinline__ u64 zigzag_bytes(int size) const { return (size * (u64)changed() + 7) / 8 * 8; }
    __device__ __forceinline__ u64 bytes(int size) const {
        return ranks_bytes() + zigzag_bytes(size) + (size * (u64)values + 7) / 8 * 8;
    }
};

__device__ __forceinline__ u64 aligned(u64 bytes) { return (bytes + 15) / 16 * 16; }
__device__ __forceinline__ u64 blocks(u64 bytes, u32 block_bytes) { return (bytes + block_bytes - 1) / block_bytes; }

// Return the number of the last run that begins at or before this frame.
__device__ __forceinline__ u32 run_of(const Run* runs, u32 count, u32 frame) {
    u32 run = 0;
    for (u32 step = GROUPS / 2; step; step /= 2)
        if (run + step < count && runs[run + step].frames <= frame) run += step;
    return run;
}

// sources, sizes, destinations, lengths: of all frames, the arguments of huffman_decode; the frames of a blob that is
// not fine are empty. The highest bit of a size means that huffman_decode does not read the frame.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 8) sparse_tables(const Stored* stored, Needs* needs,
                                                                       Blob* blobs, Group* groups, u64* sources,
                                                                       u64* sizes, u64* destinations, u64* lengths) {
    __shared__ Run runs[GROUPS];
    const Stored blob = stored[blockIdx.x];
    const int size = blob.element_size;
    const u8 *payload = (const u8*)blob.payload, *table = payload + 4;
    const u32 first = EACH * threadIdx.x;
    u64 gaps = 0, values = 0, changed = 0, bytes = 0, ends = 0, wrong = 0, streams = 0, frames = 0;
    for (u32 g = first; g < first + EACH && g < blob.groups; g++) {
        const Row row(table + ROW_BYTES * g);
        wrong += row.wrong(g ? table[ROW_BYTES * (g - 1)] : -1, g + 1 == blob.groups, size);
        gaps += row.gaps, values += row.values, changed += row.changed(), bytes += row.bytes(size), ends += row.flags & 1;
    }
    u64 gaps_before, values_before, bytes_before, run_before, total, all_bytes, run_count, all_streams, all_frames;
    gaps_before = scan<GROUP_THREADS>(gaps, total);
    values_before = scan<GROUP_THREADS>(values, total);
    bytes_before = scan<GROUP_THREADS>(bytes, all_bytes);
    run_before = scan<GROUP_THREADS>(ends, run_count);
    scan<GROUP_THREADS>(changed, total);
    bool fine = blob.groups && total <= blob.elements;
    scan<GROUP_THREADS>(wrong, total);
    fine &= !total;

    u64 g_end = gaps_before, v_end = values_before;
    for (u32 g = first, r = run_before; g < first + EACH && g < blob.groups; g++) {
        const Row row(table + ROW_BYTES * g);
        g_end += row.gaps, v_end += row.values;
        if (row.flags & 1) runs[r++] = {g_end, v_end, 0, 0};
    }
    __syncthreads();
    const auto gaps_of = [&](u32 r) { return runs[r].gaps_end - (r ? runs[r - 1].gaps_end : 0); };
    const auto values_of = [&](u32 r) { return runs[r].values_end - (r ? runs[r - 1].values_end : 0); };
    for (u32 r = first; r < first + EACH && r < run_count; r++) {
        streams += aligned(gaps_of(r)) + aligned(values_of(r));
        frames += blocks(gaps_of(r), blob.block_bytes) + blocks(values_of(r), blob.block_bytes);
    }
    u64 at = scan<GROUP_THREADS>(streams, all_streams), frame = scan<GROUP_THREADS>(frames, all_frames);
    fine &= all_frames == blob.frames;
    for (u32 r = first; r < first + EACH && r < run_count; r++) {
        runs[r].at = at, runs[r].frames = (u32)frame;
        at += aligned(gaps_of(r)) + aligned(values_of(r));
        frame += blocks(gaps_of(r), blob.block_bytes) + blocks(values_of(r), blob.block_bytes);
    }
    u64 own = 0;
    for (u32 i = threadIdx.x; i < blob.frames; i += GROUP_THREADS) own += load_element((const u8*)blob.lengths + 4 * i, 4);
    scan<GROUP_THREADS>(own, total);  // it synchronizes: the runs are written
    const u64 frames_at = blob.payload + 4 + ROW_BYTES * blob.groups, end = blob.payload + blob.payload_bytes;
    fine &= frames_at <= end && total <= end - frames_at;

    u64 room = bytes_before;
    for (u32 g = first, r = run_before; g < first + EACH && g < blob.groups; g++) {
        const Row row(table + ROW_BYTES * g);
        Group group = {};
        group.blob = blockIdx.x;
        if (fine) {
            const Run run = runs[r];
            group.symbols = run.at + gaps_before - (r ? runs[r - 1].gaps_end : 0);
            group.values = run.at + aligned(gaps_of(r)) + values_before - (r ? runs[r - 1].values_end : 0);
            group.ranks = room, group.zigzag = room + row.ranks_bytes();
            group.found = group.zigzag + row.zigzag_bytes(size);
            group.gaps = row.gaps, group.value_count = row.values;
            group.last_key = row.last_key, group.gap_shift = row.gap_shift, group.value_shift = row.value_shift;
        }
        groups[blob.first_group + g] = group;
        gaps_before += row.gaps, values_before += row.values, room += row.bytes(size), r += row.flags & 1;
    }
    u64 source = frames_at, others = 0;
    for (u32 done = 0; done < blob.frames; done += GROUP_THREADS) {
        const u32 i = done + threadIdx.x;
        const u64 length = i < blob.frames ? load_element((const u8*)blob.lengths + 4 * i, 4) : 0;
        const u64 from = source + scan<GROUP_THREADS>(length, total);
        source += total;
        if (i >= blob.frames) continue;
        u64 to = 0, plain = 0, other = 0;
        if (fine) {
            const u32 r = run_of(runs, run_count, i);
            const u64 of_gaps = gaps_of(r), before = blocks(of_gaps, blob.block_bytes);
            const u64 number = i - runs[r].frames, n = number < before ? number : number - before;
            const u64 left = (number < before ? of_gaps : values_of(r)) - n * blob.block_bytes;
            to = runs[r].at + (number < before ? 0 : aligned(of_gaps)) + n * blob.block_bytes;
            plain = left < blob.block_bytes ? left : blob.block_bytes;
            Literals found;
            other = kind_of((const u8*)from, (u32)length, (u32)plain, found) == BAD;
        }
        others += other;
        const u32 place = blob.first_frame + i;
        sources[place] = from, destinations[place] = to, lengths[place] = plain;
        sizes[place] = fine ? length | other << 63 : 0;
    }
    scan<GROUP_THREADS>(others, total);
    if (threadIdx.x) return;
    needs[blockIdx.x] = {fine ? all_streams : 0, fine ? all_bytes : 0, (u32)total, fine};
    blobs[blockIdx.x] = {fine ? source : 0, fine ? end : 0,    blob.elements,     blob.first_group, blob.groups,
                         blob.first_frame,  blob.frames, blob.element_size, blob.layout,      {}};
}
