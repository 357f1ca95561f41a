// Turn the offsets in the tables that sparse_tables.cu wrote into addresses, once their memory is allocated.
//
// One thread block per blob: grid (n), block (GROUP_THREADS). streams, changes: (n,) addresses of each blob's memory.
extern "C" __global__ void sparse_place(const u64* streams, const u64* changes, const Blob* blobs, Group* groups,
                                        u64* destinations) {
    const Blob blob = blobs[blockIdx.x];
    const u64 symbols_at = streams[blockIdx.x], changes_at = changes[blockIdx.x];
    for (u32 g = threadIdx.x; g < blob.groups; g += GROUP_THREADS) {
        Group& group = groups[blob.first_group + g];
        group.symbols += symbols_at, group.values += symbols_at;
        group.ranks += changes_at, group.zigzag += changes_at, group.found += changes_at;
    }
    for (u32 i = threadIdx.x; i < blob.frames; i += GROUP_THREADS) destinations[blob.first_frame + i] += symbols_at;
}
