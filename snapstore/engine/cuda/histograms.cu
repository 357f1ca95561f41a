// Compute entropy and skew of the byte planes of many chunks, and of their zigzagged differences from a base or their
// XORs with it, from a sample. It does the work of planes.sample, planes.histograms and planes.statistics for a batch.
//
// One thread block per chunk: grid (n), block (THREADS). A base address of 0 means no base.

#define THREADS 256
#define RUNS 128
#define RUN 32

__device__ __forceinline__ u64 rotated(u64 value, int bits) {  // rotate `bits` bits left by one
    u64 mask = bits == 64 ? ~0ull : (1ull << bits) - 1;
    return (value << 1 | value >> (bits - 1)) & mask;
}

__device__ __forceinline__ u64 zigzag(u64 difference, int bits) {  // only its lowest `bits` bits count
    return difference << 1 ^ (0 - (difference >> (bits - 1) & 1));
}

__device__ __forceinline__ void count_element(u32 (*counts)[256], u64 value, int size) {
    for (int k = 0; k < size; k++) atomicAdd(&counts[k][(value >> (8 * k)) & 255], 1u);
}

// Where sampled run k begins, in units of 2^-32 of a part: as planes._sampled_at.
__device__ __forceinline__ u64 sampled_at(u32 k) {
    u32 mixed = (k + 1) * 2654435769u;
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6Bu;
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35u;
    return (u64)k << 32 | (mixed ^ mixed >> 16);
}

// xored: whether deltas are XORs, which are rotated as chunks are; else they are differences.
// out: (n, 2, 8, 2) double. The axes: chunk; itself or its delta; plane; bits per byte or share of the most
// frequent byte.
extern "C" __global__ void histograms(const u64* chunks, const u64* bases, const u64* lengths, const u8* element_sizes,
                                      const u8* layouts, double* out, u64 xored) {
    __shared__ u32 counts[16][256];
    const u8* chunk = (const u8*)chunks[blockIdx.x];
    const u8* base = (const u8*)bases[blockIdx.x];
    const int size = element_sizes[blockIdx.x], layout = size > 1 ? layouts[blockIdx.x] : 0;
    for (int i = threadIdx.x; i < 16 * 256; i += THREADS) counts[i / 256][i % 256] = 0;
    __syncthreads();

    const u64 elements = lengths[blockIdx.x] / size, runs = elements / RUN;
    const bool all = runs < 2 * RUNS;  // of a short chunk
    const u64 total = all ? elements : RUNS * RUN;
    for (u64 i = threadIdx.x; i < total; i += THREADS) {
        const u64 at = all ? i : (sampled_at((u32)(i / RUN)) * runs >> 39) * RUN + i % RUN;
        u64 value = load_element(chunk + at * size, size);
        count_element(counts, layout ? rotated(value, 8 * size) : value, size);
        if (!base) continue;
        const u64 before = load_element(base + at * size, size);
        u64 delta = xored ? value ^ before : zigzag(value - before, 8 * size);
        if (xored && layout) delta = rotated(delta, 8 * size);
        count_element(counts + 8, delta, size);
    }
    __syncthreads();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int row = warp; row < 16; row += THREADS / 32) {  // a warp per plane
        double bits = 0;
        u32 most = 0, kinds = 0;
        if (row % 8 < size && total && (row < 8 || base)) {
            for (int i = lane; i < 256; i += 32) {
                u32 count = counts[row][i];
                if (count) {
                    double share = (double)count / (double)total;
                    bits -= share * log2(share);
                    kinds++;
                    most = count > most ? count : most;
                }
            }
        }
        for (int step = 16; step; step /= 2) {
            bits += __shfl_xor_sync(0xFFFFFFFFu, bits, step);
            kinds += __shfl_xor_sync(0xFFFFFFFFu, kinds, step);
            u32 other = __shfl_xor_sync(0xFFFFFFFFu, most, step);
            most = other > most ? other : most;
        }
        if (lane == 0) {
            double n = total ? (double)total : 1;
            if (kinds) bits += (kinds - 1) / (2 * 0.69314718055994530942 * n);  // Miller-Madow, as planes.statistics
            double* result = out + ((u64)blockIdx.x * 16 + row) * 2;
            result[0] = bits < 0 ? 0 : bits > 8 ? 8 : bits;
            result[1] = most / n;
        }
    }
}
