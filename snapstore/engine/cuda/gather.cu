// Copy many pieces of memory from any address to any address: compressed blocks into one buffer, tensors into their
// copies. Pieces should be short (the callers take at most 64 and 256 KiB), so that the whole device works.
//
// One thread block per piece: grid (n), block (THREADS).

#define THREADS 256

extern "C" __global__ void gather(const u64* sources, const u64* destinations, const u64* lengths) {
    copy<THREADS>((u8*)destinations[blockIdx.x], (const u8*)sources[blockIdx.x], lengths[blockIdx.x]);
}
