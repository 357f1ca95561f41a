// The elements that differ from a base to the payload of a sparse delta, as sparse.py makes it (docs/format.md,
// "Sparse deltas"). Two passes over the elements: the first counts what changed by keys, which gives the groups;
// the second collects the changes of each group.
#include "native.h"

// As in sparse.py.
#define SAMPLED 61
#define FEW 32  // one in so many: then a branch for each is predicted well
#define MIN_GROUP 128
#define ALONE_ABOVE 32768
#define DENSE_ABOVE_SHARE 0.55
#define FRAME_COST 20.0
#define SYMBOL_COST 0.45

// Two streams of symbols that share frames.
typedef struct {
    u32 counts[2][256];
    u32 total[2];
} Joined;

// The elements of each key: in a sample, all, and those that changed.
typedef struct {
    u32 sampled[256], members[256], changed[256];
} SparseCounts;

// Join neighbouring keys to groups, as `sparse._last_keys`. Return the number of groups.
static u32 make_groups(const SparseCounts *counts, SparseGroup *groups, u8 *of_key) {
    const u32 *changed = counts->changed, *sampled = counts->sampled;
    u64 own = 0, members = 0, left = 0;
    u32 count = 0, ends[257];
    for (int k = 0; k < 256; k++) left += changed[k];
    for (u32 k = 0; k < 256; k++) {
        const bool is_alone = (u64)sampled[k] * SAMPLED > ALONE_ABOVE;
        if (is_alone && members) {
            if (k && (!count || ends[count - 1] != k - 1)) ends[count++] = k - 1;
            own = members = 0;
        }
        own += changed[k], members += sampled[k], left -= changed[k];
        if (is_alone || (own >= MIN_GROUP && left >= MIN_GROUP)) {
            ends[count++] = k;
            own = members = 0;
        }
    }
    if (!count || ends[count - 1] != 255) ends[count++] = 255;
    for (u32 g = 0, k = 0; g < count; g++) {
        memset(&groups[g], 0, sizeof groups[g]);
        groups[g].last_key = ends[g];
        for (; k <= ends[g]; k++) {
            of_key[k] = (u8)g;
            groups[g].changed += changed[k], groups[g].members += counts->members[k];
        }
    }
    return count;
}

// Give each group the place of its changes: those of a dense group need as many as it has members. Return whether
// there is room for them.
static bool place_changes(SparseGroups *all) {
    u64 at = 0;
    for (u32 g = 0; g < all->count; g++) {
        SparseGroup *group = &all->groups[g];
        const bool is_dense = group->changed > DENSE_ABOVE_SHARE * group->members;
        group->begin = (u32)at;
        group->gap_shift = is_dense ? SPARSE_DENSE : 0;
        at += 1 + (is_dense ? group->members : group->changed);  // one more is written behind the last
        if (at > all->most_changes) return false;
    }
    return true;
}

INLINE u32 zigzag_of(u32 after, u32 before, int bits) {
    const u32 difference = (after - before) << (32 - bits);
    const u32 sign = (u32)((int32_t)difference >> 31);
    return (difference << 1 ^ sign << (32 - bits)) >> (32 - bits);
}

// Collect the changes of all groups: with a branch for each element, if few of them changed, else without.
#define COLLECT(BITS, IS_SKIPPED)                                                                            \
    for (size_t i = 0; i < n; i++) {                                                                         \
        const u32 g = all->of_key[layout == LAYOUT_BYTES ? 0 : sparse_key(y[i], BITS)];                      \
        const u32 r = rank[g]++, taken = (x[i] != y[i]) | is_dense[g];                                       \
        if (IS_SKIPPED) continue;                                                                            \
        all->changes[at[g]] = (SparseChange){r - after[g], zigzag_of(x[i], y[i], BITS)};                     \
        at[g] += taken;                                                                                      \
        after[g] = taken ? r + 1 : after[g];                                                                 \
    }

#define PASSES(T, BITS)                                                                                      \
    typedef T __attribute__((aligned(1), may_alias)) element_##BITS;                                         \
    static void count_##BITS(const u8 *source, const u8 *base, int layout, size_t n, SparseCounts *counts) { \
        const element_##BITS *x = (const element_##BITS *)source, *y = (const element_##BITS *)base;         \
        u64 both[4][256] = {{0}}; /* members, and in the upper half how many of them changed */              \
        for (size_t i = 0; i < n; i++)                                                                       \
            both[i & 3][layout == LAYOUT_BYTES ? 0 : sparse_key(y[i], BITS)] += 1 + ((u64)(x[i] != y[i]) << 32); \
        for (size_t i = 0; i < n; i += SAMPLED)                                                              \
            counts->sampled[layout == LAYOUT_BYTES ? 0 : sparse_key(y[i], BITS)]++;                          \
        for (int k = 0; k < 256; k++) {                                                                      \
            const u64 sum = both[0][k] + both[1][k] + both[2][k] + both[3][k];                               \
            counts->members[k] = (u32)sum, counts->changed[k] = (u32)(sum >> 32);                            \
        }                                                                                                    \
    }                                                                                                        \
    static void collect_##BITS(const u8 *source, const u8 *base, int layout, size_t n, SparseGroups *all,    \
                               bool are_few) {                                                               \
        const element_##BITS *x = (const element_##BITS *)source, *y = (const element_##BITS *)base;         \
        u32 rank[256] = {0}, after[256] = {0}, at[256], is_dense[256];                                       \
        for (u32 g = 0; g < all->count; g++) {                                                               \
            at[g] = all->groups[g].begin;                                                                    \
            is_dense[g] = all->groups[g].gap_shift == SPARSE_DENSE;                                          \
        }                                                                                                    \
        if (are_few) COLLECT(BITS, !taken) else COLLECT(BITS, false)                                         \
    }
PASSES(u16, 16)
PASSES(u32, 32)

// Return how many bits the median of numbers has, the greater of two medians, by how many numbers have 0 to 32 bits.
static u32 bits_of_median(const u32 *of_bits, u32 count) {
    u32 below = 0;
    for (u32 bits = 0; bits < 32; bits++) {
        below += of_bits[bits];
        if (below > count / 2) return bits;
    }
    return 32;
}

INLINE u32 bits_of(u32 value) { return value ? high_bit(value) + 1 : 0; }

// Choose the shifts of a group.
static void choose_shifts(SparseGroup *g, const SparseChange *changes, int size) {
    const bool is_dense = g->gap_shift == SPARSE_DENSE;
    u32 of_gaps[33] = {0}, of_values[33] = {0};
    const u32 count = is_dense ? g->members : g->changed;
    for (u32 i = 0; i < count; i++) {
        const SparseChange c = changes[g->begin + i];
        if (is_dense) {
            of_values[bits_of(c.zigzag)]++;
            continue;
        }
        of_gaps[bits_of(c.gap)]++;
        if (c.zigzag > 2) of_values[bits_of(c.zigzag - 3)]++, g->values++;
    }
    g->gaps = is_dense ? 0 : count;
    if (is_dense) g->values = count;
    if (g->gaps) {  // then at least half of the quotients are below 4
        const u32 bits = bits_of_median(of_gaps, count);
        g->gap_shift = bits > 2 ? bits - 2 : 0;
    }
    if (g->values) {
        const u32 bits = bits_of_median(of_values, g->values), low = bits > 1 ? (bits - 1) / 8 : 0;
        g->low_bytes = low < (u32)size - 1 ? low : (u32)size - 1;
    }
}

// What is being written: symbols, and low parts.
typedef struct {
    u8 *gaps, *values;
    u32 gaps_at, values_at;
    u8 *low, *low_end;
} Streams;

// Append the low parts of a group, and its symbols. Return false if there is no room.
static bool put_group(SparseGroup *g, const SparseChange *changes, int size, Streams *out) {
    const bool is_dense = g->gap_shift == SPARSE_DENSE;
    const u32 count = is_dense ? g->values : g->gaps, shift = is_dense ? 0 : g->gap_shift;
    const SparseChange *own = changes + g->begin;
    // at most half of the gaps are escaped: the median is not
    const size_t of_values = (size_t)g->values * (g->low_bytes + (u32)size);
    const size_t most = is_dense ? of_values : of_values + (size_t)count * shift / 8 + 2 * (size_t)count + 16;
    if ((size_t)(out->low_end - out->low) < most) return false;
    g->gaps_at = out->gaps_at, g->values_at = out->values_at;
    u8 *p = out->low;
    if (!is_dense) {
        u64 word = 0;
        u32 bits = 0;
        for (u32 i = 0; i < count; i++) {
            const u32 quotient = own[i].gap >> shift;
            const u8 kind = (u8)(own[i].zigzag > 2 ? SPARSE_OTHER : own[i].zigzag - 1);
            const u8 symbol = (u8)(3 * (quotient < SPARSE_GAP_ESCAPE ? quotient : SPARSE_GAP_ESCAPE) + kind);
            out->gaps[out->gaps_at++] = symbol;
            g->counts[0][symbol]++;
            word = word << shift | (own[i].gap & ((1u << shift) - 1));
            for (bits += shift; bits >= 8; bits -= 8) *p++ = (u8)(word >> (bits - 8));
        }
        if (bits) *p++ = (u8)(word << (8 - bits));
        for (u32 i = 0; i < count; i++) {
            const u32 quotient = own[i].gap >> shift;
            if (quotient < SPARSE_GAP_ESCAPE) continue;
            put_le(p, quotient, 4);
            p += 4;
        }
    }
    const u32 low_bits = 8 * g->low_bytes;
    for (u32 i = 0; i < count; i++) {
        if (!is_dense && own[i].zigzag < 3) continue;
        const u32 value = is_dense ? own[i].zigzag : own[i].zigzag - 3, quotient = value >> low_bits;
        const u8 symbol = (u8)(quotient < SPARSE_VALUE_ESCAPE ? quotient : SPARSE_VALUE_ESCAPE);
        out->values[out->values_at++] = symbol;
        g->counts[1][symbol]++;
        put_le(p, value, (int)g->low_bytes);
        p += g->low_bytes;
    }
    for (u32 i = 0; i < count; i++) {
        if (!is_dense && own[i].zigzag < 3) continue;
        const u32 quotient = (is_dense ? own[i].zigzag : own[i].zigzag - 3) >> low_bits;
        if (quotient < SPARSE_VALUE_ESCAPE) continue;
        put_le(p, quotient, size);
        p += size;
    }
    out->low = p;
    return true;
}

// Return log2, to three digits: it only decides which groups share frames.
static double log2_about(double value) {
    u64 bits;
    memcpy(&bits, &value, sizeof bits);
    const double exponent = (double)(bits >> 52) - 1023;
    bits = (bits & ((1ull << 52) - 1)) | 1023ull << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return exponent + ((-0.33582878 * x + 2.0) * x - 1.65871022);
}

// Estimate the stored bytes of two streams, one frame each, as `sparse._costs`.
static double cost_of(const u32 counts[2][256], const u32 more[2][256]) {
    double cost = 0;
    for (int s = 0; s < 2; s++) {
        double total = 0, terms = 0;
        u32 distinct = 0;
        for (int i = 0; i < 256; i++) {
            const u32 count = counts[s][i] + (more ? more[s][i] : 0);
            if (!count) continue;
            total += count, distinct++;
            terms += count * log2_about(count);
        }
        if (!distinct) continue;
        const double bits = total * log2_about(total) - terms;
        if (distinct > 1) cost += (bits > total ? bits : total) / 8;
        cost += FRAME_COST + SYMBOL_COST * distinct;
    }
    return cost;
}

// Append frames of symbols. Return false if there is no room.
static bool put_frames(const u8 *symbols, size_t count, u8 *out, size_t room, SparseWriter *w, EncodeTables *tables) {
    for (size_t from = 0; from < count; from += BLOCK_BYTES) {
        const size_t bytes = count - from < BLOCK_BYTES ? count - from : BLOCK_BYTES;
        if (w->bytes + bytes + FRAME_SLACK > room) return false;
        const size_t length = encode_frame(symbols + from, (u32)bytes, out + w->bytes, tables, &w->repeating);
        put_le(w->lengths + 4 * (size_t)w->frames++, length, 4);
        w->bytes += length;
    }
    return true;
}

// Write the table of groups and the frames. Return false if there is no room.
static bool put_payload(SparseGroups *all, const Streams *streams, u8 *out, size_t room, SparseWriter *w,
                        EncodeTables *tables) {
    w->bytes = 4 + (size_t)all->count * SPARSE_GROUP_BYTES;
    if (w->bytes > room) return false;
    put_le(out, all->count, 4);
    u32 begin = 0;
    Joined joined;
    memcpy(joined.counts, all->groups[0].counts, sizeof joined.counts);
    double cost = cost_of(joined.counts, NULL);
    for (u32 g = 0; g < all->count; g++) {
        const SparseGroup *group = &all->groups[g], *next = g + 1 < all->count ? group + 1 : NULL;
        bool ends = true;
        if (next) {
            const double own = cost_of(next->counts, NULL), together = cost_of(joined.counts, next->counts);
            ends = together > cost + own;
            for (int i = 0; i < 512; i++) {
                u32 *into = &joined.counts[0][0] + i;
                *into = (ends ? 0 : *into) + (&next->counts[0][0])[i];
            }
            cost = ends ? own : together;
        }
        u8 *row = out + 4 + g * SPARSE_GROUP_BYTES;
        row[0] = (u8)group->last_key, row[1] = (u8)group->gap_shift, row[2] = (u8)(8 * group->low_bytes), row[3] = ends;
        put_le(row + 4, group->gaps, 4);
        put_le(row + 8, group->values, 4);
        if (!ends) continue;
        const SparseGroup *first = &all->groups[begin];
        const u32 gaps = group->gaps_at + group->gaps - first->gaps_at;
        const u32 values = group->values_at + group->values - first->values_at;
        if (!put_frames(streams->gaps + first->gaps_at, gaps, out, room, w, tables)) return false;
        if (!put_frames(streams->values + first->values_at, values, out, room, w, tables)) return false;
        begin = g + 1;
    }
    return true;
}

bool encode_sparse(const u8 *source, const u8 *base, int size, int layout, size_t n, u8 *out, size_t room,
                   u8 *scratch, size_t scratch_bytes, SparseWriter *w, SparseGroups *all, EncodeTables *tables) {
    SparseCounts counts = {0};
    if ((size != 2 && size != 4) || n > SPARSE_MOST_ELEMENTS) return false;
    (size == 2 ? count_16 : count_32)(source, base, layout, n, &counts);
    all->count = make_groups(&counts, all->groups, all->of_key);
    // scratch: symbols of gaps and of values, changes; and the low parts behind them
    const size_t symbols = 2 * ((n + 7) & ~(size_t)7);
    if (scratch_bytes < symbols) return false;
    all->changes = (SparseChange *)(scratch + symbols);
    all->most_changes = (scratch_bytes - symbols) / sizeof(SparseChange);
    if (!place_changes(all)) return false;
    size_t changed = 0;
    for (int k = 0; k < 256; k++) changed += counts.changed[k];
    (size == 2 ? collect_16 : collect_32)(source, base, layout, n, all, changed < n / FEW);
    const SparseGroup *last = &all->groups[all->count - 1];
    u8 *low = (u8 *)(all->changes + last->begin + (last->gap_shift == SPARSE_DENSE ? last->members : last->changed));
    Streams streams = {.gaps = scratch, .values = scratch + symbols / 2, .low = low, .low_end = scratch + scratch_bytes};
    for (u32 g = 0; g < all->count; g++) {
        choose_shifts(&all->groups[g], all->changes, size);
        if (!put_group(&all->groups[g], all->changes, size, &streams)) return false;
    }
    if (!put_payload(all, &streams, out, room, w, tables)) return false;
    const size_t low_bytes = (size_t)(streams.low - low);
    if (low_bytes + 8 > room - w->bytes) return false;  // a blob is padded to 8 bytes
    memcpy(out + w->bytes, low, low_bytes);
    w->bytes += low_bytes;
    return true;
}
