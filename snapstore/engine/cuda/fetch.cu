// Copy a little device memory to page-locked host memory. A kernel copies it, because the device's copy engine would
// first finish all other copies to the host.
//
// One thread block per piece of PIECE_BYTES: grid (n), block (THREADS).

#define THREADS 256
#define PIECE_BYTES (64 * 1024)

extern "C" __global__ void fetch(u64 source, u64 destination, u64 length) {
    const u64 at = (u64)blockIdx.x * PIECE_BYTES, left = length - at;
    copy<THREADS>((u8*)destination + at, (const u8*)source + at, left < PIECE_BYTES ? left : PIECE_BYTES);
}
