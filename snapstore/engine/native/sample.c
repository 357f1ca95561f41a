// Statistics of sampled elements: of the same elements as `planes.sample` takes, so that every engine chooses
// alike.
#include "native.h"

#define SAMPLE_RUNS 128
#define SAMPLE_RUN 32  // elements
#define TILE 4096      // elements that are compared before the count is checked

// Return which of `runs` runs the sample takes from part `part` of a chunk (`planes.sampled_runs`): the
// places are mixed as by MurmurHash3's finalizer.
static size_t sampled_run(u32 part, size_t runs) {
    u32 mixed = (part + 1) * 2654435769u;
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6Bu;
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35u;
    mixed ^= mixed >> 16;
    return (size_t)(((u64)part << 32 | mixed) * (u64)runs >> (32 + 7));  // 2^7 parts
}

static void count_planes(const u8 *source, const u8 *base, Elements e, size_t n, u32 *counts) {
    u8 room[MAX_PLANES][SAMPLE_RUN], *planes[MAX_PLANES];
    for (int k = 0; k < MAX_PLANES; k++) planes[k] = room[k];
    split_planes(source, base, e, n, planes);
    for (int k = 0; k < e.size; k++)
        for (size_t i = 0; i < n; i++) counts[256 * k + room[k][i]]++;
}

// Count the bytes of sampled elements in each plane, (size, 256); return how many elements were counted.
static size_t sample_histograms(const u8 *source, const u8 *base, Elements elements, size_t n, u32 *counts) {
    const size_t runs = n / SAMPLE_RUN, size = (size_t)elements.size;
    if (runs < 2 * SAMPLE_RUNS) {
        for (size_t at = 0; at < n; at += SAMPLE_RUN) {
            const size_t count = n - at < SAMPLE_RUN ? n - at : SAMPLE_RUN;
            count_planes(source + at * size, base ? base + at * size : NULL, elements, count, counts);
        }
        return n;
    }
    for (u32 part = 0; part < SAMPLE_RUNS; part++) {
        const size_t at = sampled_run(part, runs) * SAMPLE_RUN * size;
        count_planes(source + at, base ? base + at : NULL, elements, SAMPLE_RUN, counts);
    }
    return (size_t)SAMPLE_RUNS * SAMPLE_RUN;
}

void sample_planes(const u8 *source, const u8 *base, Elements elements, size_t n, const i64 *terms,
                   PlaneSums *sums) {
    u32 counts[MAX_PLANES * 256] = {0};
    const size_t total = sample_histograms(source, base, elements, n, counts);
    for (int k = 0; k < elements.size; k++) {
        const u32 *of_plane = counts + 256 * k;
        sums[k] = (PlaneSums){.total = (i64)total};
        for (int value = 0; value < 256; value++) {
            const i64 count = of_plane[value];
            sums[k].terms += terms[count];
            sums[k].distinct += count > 0;
            if (count > sums[k].top) sums[k].top = count;
        }
    }
}

#define COUNT(T, BITS)                                                                                       \
    typedef T __attribute__((aligned(1), may_alias)) unaligned_##BITS;                                       \
    INLINE u64 differing_##BITS(const u8 *source, const u8 *base, size_t n) {                                \
        const unaligned_##BITS *x = (const unaligned_##BITS *)source, *y = (const unaligned_##BITS *)base;   \
        T changed = 0;                                                                                       \
        u64 total = 0;                                                                                       \
        for (size_t at = 0; at < n; at += 128, changed = 0) { /* so few that T can count them */             \
            for (size_t i = at; i < (n - at < 128 ? n : at + 128); i++)                                      \
                changed = (T)(changed + (x[i] != y[i]));                                                     \
            total += changed;                                                                                \
        }                                                                                                    \
        return total;                                                                                        \
    }
COUNT(u8, 8)
COUNT(u16, 16)
COUNT(u32, 32)
COUNT(u64, 64)

INLINE u64 differing(const u8 *source, const u8 *base, int size, size_t n) {
    switch (size) {
    case 1: return differing_8(source, base, n);
    case 2: return differing_16(source, base, n);
    case 4: return differing_32(source, base, n);
    default: return differing_64(source, base, n);
    }
}

#if HAS_AVX2_CODE
AVX2 static u64 differing_avx2(const u8 *source, const u8 *base, int size, size_t n) {
    return differing(source, base, size, n);
}
#endif

static u64 differing_plain(const u8 *source, const u8 *base, int size, size_t n) {
    return differing(source, base, size, n);
}

u64 count_changed(const u8 *source, const u8 *base, int size, size_t n, u64 most) {
    u64 (*count)(const u8 *, const u8 *, int, size_t) = differing_plain;
#if HAS_AVX2_CODE
    if (use_avx2) count = differing_avx2;
#endif
    u64 changed = 0;
    for (size_t at = 0; at < n && changed <= most; at += TILE) {
        const size_t offset = at * (size_t)size;
        changed += count(source + offset, base + offset, size, n - at < TILE ? n - at : TILE);
    }
    return changed;
}
