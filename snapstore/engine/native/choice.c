// How to store a chunk: full or as a delta, by which codecs, and whether to try a sparse delta. It equals
// `reference.encode_chunk` bit for bit: the same operations on doubles in the same order, which a compiler may not join
// (-std=c11 sees to that), on sums of integers. The numbers are those of plane_kinds.py, delta_choice.py, sparse.py.
#include "native.h"

#define RAW_ABOVE_BITS 7.9
#define RUNS_ABOVE_SHARE 0.78
#define BLOCK_OVERHEAD_BYTES 96.0
#define MIN_SAVING (1.0 / 32)
#define FEW_CHANGED_SHARE 0.2
#define FEW_CHANGED_EXCESS 1.25
#define TRIED_BELOW_SHARE 0.5
#define ENTROPY_UNIT 4294967296.0
#define LOG_2 0.693147180559945309417232121458

typedef struct {
    double bits[MAX_PLANES], top_share[MAX_PLANES];
} Statistics;

INLINE double least(double a, double b) { return a < b ? a : b; }

// Return entropy and skew of planes, as `planes.statistics_of`.
static Statistics statistics_of(const PlaneSums *sums, int planes, const i64 *terms) {
    Statistics found = {0};
    for (int k = 0; k < planes; k++) {
        const i64 counted = sums[k].total > 1 ? sums[k].total : 1;
        const double total = (double)counted;
        double bits = (double)(terms[counted] - sums[k].terms) / (total * ENTROPY_UNIT);
        bits += (double)(sums[k].distinct - 1) / (2 * LOG_2 * total);
        found.bits[k] = bits < 0 ? 0 : least(bits, 8);
        found.top_share[k] = (double)sums[k].top / total;
    }
    return found;
}

// Estimate the stored bytes of planes of `bytes` bytes, as `plane_kinds.estimate_bytes`.
static double estimate_bytes(const Statistics *found, int planes, size_t bytes) {
    const double size = (double)bytes;
    const double overhead = BLOCK_OVERHEAD_BYTES * (double)(bytes / BLOCK_BYTES + (bytes % BLOCK_BYTES > 0));
    double total = 0;
    for (int k = 0; k < planes; k++) {
        const double bits = found->bits[k];
        total += bits > RAW_ABOVE_BITS ? size : least(size, size * bits / 8 + overhead);
    }
    return total;
}

// Return the least integer that is not less, of a number that is not negative and below 2^53.
INLINE double ceiling(double number) {
    const double whole = (double)(i64)number;
    return whole < number ? whole + 1 : whole;
}

static u8 kind_of(double bits, double top_share, int layout) {
    if (bits > RAW_ABOVE_BITS) return NOISE;
    if (layout == LAYOUT_BYTES) return REPEATS;
    return top_share >= RUNS_ABOVE_SHARE ? RUNS : SKEWED;
}

Choice choose(const u8 *chunk, const u8 *base, Elements elements, size_t n, i64 limit, const i64 *terms) {
    const int size = elements.size;
    const double count = (double)n;
    Choice choice = {.kinds = {NOISE}};
    PlaneSums sums[MAX_PLANES] = {{0}};
    Statistics delta = {0};
    double changed = count;
    if (base) {  // first what reads whole chunks, so that the others find them in the cache
        changed = (double)count_changed(chunk, base, size, n, n / 2);
        sample_planes(chunk, base,
                      (Elements){size, elements.mode == XOR ? elements.layout : LAYOUT_BYTES, elements.mode}, n,
                      terms, sums);
        delta = statistics_of(sums, size, terms);
    }
    sample_planes(chunk, NULL, (Elements){size, elements.layout, NONE}, n, terms, sums);
    const Statistics full = statistics_of(sums, size, terms);
    const double full_bytes = estimate_bytes(&full, size, n), delta_bytes = estimate_bytes(&delta, size, n);
    const double most = full_bytes * (1 - MIN_SAVING);
    choice.is_sparse =
        base && elements.mode != XOR && changed <= TRIED_BELOW_SHARE * count && n <= SPARSE_MOST_ELEMENTS;
    choice.is_delta = base && delta_bytes <= most && delta_bytes <= (double)limit;
    const double excess = changed <= FEW_CHANGED_SHARE * count ? FEW_CHANGED_EXCESS : 1;
    const double below = ceiling(least(full_bytes, delta_bytes * excess) + BLOB_HEADER_BYTES) - 1;
    const double most_bytes = least(below, least(most, (double)limit));
    choice.most = base && most_bytes > 0 ? (i64)most_bytes : 0;
    const Statistics *chosen = choice.is_delta ? &delta : &full;
    for (int k = 0; k < size; k++) {
        choice.kinds[k] = kind_of(chosen->bits[k], chosen->top_share[k], elements.layout);
        if (choice.kinds[k] == REPEATS && chosen->top_share[k] < 1) choice.is_declined = !choice.is_sparse;
    }
    return choice;
}
