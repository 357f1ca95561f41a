// Copy many pieces of memory from any address to any address: compressed blocks into one buffer, tensors into their
// copies. A piece should be a few tens of KiB at most, so that the whole device works.
//
// One thread block per piece: grid (n), block (THREADS).

#define THREADS 256
#define UNROLL 4

extern "C" __global__ void gather(const u64* sources, const u64* destinations, const u64* lengths) {
    const u8* source = (const u8*)sources[blockIdx.x];
    u8* destination = (u8*)destinations[blockIdx.x];
    u64 length = lengths[blockIdx.x];
    u64 head = (16 - ((u64)destination & 15)) & 15;  // up to the first aligned store
    if (head > length) head = length;
    if (threadIdx.x < head) destination[threadIdx.x] = source[threadIdx.x];
    source += head;
    destination += head;
    length -= head;
    const u64 whole = length / 16;
    for (u64 first = threadIdx.x; first < whole; first += THREADS * UNROLL) {
        uint4 values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (first + i * THREADS < whole) values[i] = load16(source + 16 * (first + i * THREADS));
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (first + i * THREADS < whole) *(uint4*)(destination + 16 * (first + i * THREADS)) = values[i];
    }
    const u64 tail = 16 * whole + threadIdx.x;
    if (tail < length) destination[tail] = source[tail];
}
