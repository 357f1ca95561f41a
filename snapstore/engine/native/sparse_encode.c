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

// A change: the members of its group that did not change before it, and z.
typedef struct {
    u32 gap;
    u64 zigzag;
} Change;

// The bytes of a change in memory, for elements of a size; and one that is put there, and taken from there.
INLINE size_t change_bytes(int size) { return size == 1 ? 4 : size == 8 ? 12 : 8; }

INLINE void put_change(u8 *p, int size, Change change) {
    if (size == 1) {
        put_le(p, change.gap << 8 | change.zigzag, 4);  // a gap has at most 24 bits
        return;
    }
    put_le(p, change.gap, 4);
    put_le(p + 4, change.zigzag, size == 8 ? 8 : 4);
}

INLINE Change change_at(const u8 *p, int size) {
    const u32 first = load32(p);
    if (size == 1) return (Change){first >> 8, first & 255};
    return (Change){first, size == 8 ? load64(p + 4) : load32(p + 4)};
}

// Give each group the place of its changes: those of a dense group need as many as it has members.
static void place_changes(SparseGroups *all) {
    all->changes = all->gaps = all->values = 0;
    for (u32 g = 0; g < all->count; g++) {
        SparseGroup *group = &all->groups[g];
        const bool is_dense = group->changed > DENSE_ABOVE_SHARE * group->members;
        group->begin = all->changes;
        group->gap_shift = is_dense ? SPARSE_DENSE : 0;
        all->changes += 1 + (is_dense ? group->members : group->changed);  // one more is written behind the last
        all->gaps += is_dense ? 0 : group->changed;
        all->values += is_dense ? group->members : group->changed;  // at most
    }
}

INLINE u64 element_at(const u8 *data, size_t i, int size) {
    switch (size) {
    case 1: return data[i];
    case 2: return load16(data + 2 * i);
    case 4: return load32(data + 4 * i);
    default: return load64(data + 8 * i);
    }
}

INLINE u64 zigzag_of(u64 after, u64 before, int size) {
    if (size == 8) return (after - before) << 1 ^ (u64)((i64)(after - before) >> 63);
    const int unused = 32 - 8 * size;
    const u32 difference = (u32)(after - before) << unused, sign = (u32)((int32_t)difference >> 31);
    return (difference << 1 ^ sign << unused) >> unused;
}

// What is encoded, and the memory for it.
typedef struct {
    const u8 *source, *base;
    size_t n;
    bool has_keys;  // else every key is 0
    u8 *scratch;
    size_t scratch_bytes;
} Input;

INLINE void count_keys(const Input *in, int size, SparseCounts *counts) {
    u64 both[4][256] = {{0}};  // members, and in the upper half how many of them changed
    for (size_t i = 0; i < in->n; i++) {
        const u64 x = element_at(in->source, i, size), y = element_at(in->base, i, size);
        both[i & 3][sparse_key(y, 8 * size)] += 1 + ((u64)(x != y) << 32);
    }
    for (size_t i = 0; i < in->n; i += SAMPLED) counts->sampled[sparse_key(element_at(in->base, i, size), 8 * size)]++;
    for (int k = 0; k < 256; k++) {
        const u64 sum = both[0][k] + both[1][k] + both[2][k] + both[3][k];
        counts->members[k] = (u32)sum, counts->changed[k] = (u32)(sum >> 32);
    }
}

// Collect the changes of a group that has all elements and is not dense, from one to the next.
INLINE void collect_one(const Input *in, int size, const SparseGroup *group) {
    const size_t bytes = in->n * (size_t)size;
    u8 *p = in->scratch + group->begin * change_bytes(size);
    size_t after = 0;
    for (size_t at = 0; at < bytes; at += 8) {
        const int left = bytes - at < 8 ? (int)(bytes - at) : 8;
        u64 differing = left == 8 ? load64(in->source + at) ^ load64(in->base + at)
                                  : get_le(in->source + at, left) ^ get_le(in->base + at, left);
        while (differing) {
            const u32 place = (u32)__builtin_ctzll(differing) / (8 * (u32)size);
            const size_t i = at / (size_t)size + place;
            const u64 x = element_at(in->source, i, size), y = element_at(in->base, i, size);
            put_change(p, size, (Change){(u32)(i - after), zigzag_of(x, y, size)});
            p += change_bytes(size), after = i + 1;
            differing &= ~(UINT64_MAX >> (64 - 8 * size) << 8 * (u32)size * place);
        }
    }
}

// Collect the changes of all groups: with a branch for each element, if few of them changed, else without.
INLINE void collect(const Input *in, int size, const SparseGroups *all, bool are_few) {
    const bool has_keys = in->has_keys;
    const u8 *source = in->source, *base = in->base;
    u8 *changes = in->scratch;
    const size_t n = in->n;
    u32 rank[256] = {0}, after[256] = {0}, at[256], is_dense[256];
    for (u32 g = 0; g < all->count; g++) {
        at[g] = all->groups[g].begin;
        is_dense[g] = all->groups[g].gap_shift == SPARSE_DENSE;
    }
    for (size_t i = 0; i < n; i++) {
        const u64 x = element_at(source, i, size), y = element_at(base, i, size);
        const u32 g = all->of_key[has_keys ? sparse_key(y, 8 * size) : 0];
        const u32 r = rank[g]++, taken = (x != y) | is_dense[g];
        if (are_few && !taken) continue;
        put_change(changes + at[g] * change_bytes(size), size, (Change){r - after[g], zigzag_of(x, y, size)});
        at[g] += taken;
        after[g] = taken ? r + 1 : after[g];
    }
}

// Return how many bits the median of numbers has, the greater of two medians, by how many numbers have 0 to
// 64 bits.
static u32 bits_of_median(const u32 *of_bits, u32 count) {
    u32 below = 0;
    for (u32 bits = 0; bits < 64; bits++) {
        below += of_bits[bits];
        if (below > count / 2) return bits;
    }
    return 64;
}

INLINE u32 bits_of(u64 value) { return value ? 64 - (u32)__builtin_clzll(value) : 0; }

// Choose the shifts of a group.
INLINE void choose_shifts(SparseGroup *g, const u8 *changes, int size) {
    const bool is_dense = g->gap_shift == SPARSE_DENSE;
    u32 of_gaps[65] = {0}, of_values[65] = {0};
    const u32 count = is_dense ? g->members : g->changed;
    for (u32 i = 0; i < count; i++) {
        const Change c = change_at(changes + (g->begin + i) * change_bytes(size), size);
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
    u8 *first_low, *low, *low_end;
} Streams;

// Append the low parts of a group, and its symbols. Return false if there is no room.
INLINE bool put_group(SparseGroup *g, const u8 *changes, int size, Streams *out) {
    const bool is_dense = g->gap_shift == SPARSE_DENSE;
    const u32 count = is_dense ? g->values : g->gaps, shift = is_dense ? 0 : g->gap_shift;
    const u8 *own = changes + g->begin * change_bytes(size);
    // at most half of the gaps are escaped: the median is not; 8 bytes more may be overwritten
    const size_t of_values = (size_t)g->values * (g->low_bytes + (u32)size) + 8;
    const size_t most = is_dense ? of_values : of_values + (size_t)count * shift / 8 + 2 * (size_t)count + 16;
    if ((size_t)(out->low_end - out->low) < most) return false;
    g->gaps_at = out->gaps_at, g->values_at = out->values_at;
    u8 *p = out->low;
    if (!is_dense) {
        u64 word = 0;
        u32 bits = 0;
        for (u32 i = 0; i < count; i++) {
            const Change c = change_at(own + i * change_bytes(size), size);
            const u32 quotient = c.gap >> shift;
            const u8 kind = (u8)(c.zigzag > 2 ? SPARSE_OTHER : c.zigzag - 1);
            const u8 symbol = (u8)(3 * (quotient < SPARSE_GAP_ESCAPE ? quotient : SPARSE_GAP_ESCAPE) + kind);
            out->gaps[out->gaps_at++] = symbol;
            g->counts[0][symbol]++;
            word = word << shift | (c.gap & ((1u << shift) - 1));
            for (bits += shift; bits >= 8; bits -= 8) *p++ = (u8)(word >> (bits - 8));
        }
        if (bits) *p++ = (u8)(word << (8 - bits));
        for (u32 i = 0; i < count; i++) {
            const u32 quotient = change_at(own + i * change_bytes(size), size).gap >> shift;
            if (quotient < SPARSE_GAP_ESCAPE) continue;
            put_le(p, quotient, 4);
            p += 4;
        }
    }
    const u32 low_bits = 8 * g->low_bytes;
    for (u32 i = 0; i < count; i++) {
        const u64 zigzag = change_at(own + i * change_bytes(size), size).zigzag;
        if (!is_dense && zigzag < 3) continue;
        const u64 value = is_dense ? zigzag : zigzag - 3, quotient = value >> low_bits;
        const u8 symbol = (u8)(quotient < SPARSE_VALUE_ESCAPE ? quotient : SPARSE_VALUE_ESCAPE);
        out->values[out->values_at++] = symbol;
        g->counts[1][symbol]++;
        store64(p, value);
        p += g->low_bytes;
    }
    for (u32 i = 0; i < count; i++) {
        const u64 zigzag = change_at(own + i * change_bytes(size), size).zigzag;
        if (!is_dense && zigzag < 3) continue;
        const u64 quotient = (is_dense ? zigzag : zigzag - 3) >> low_bits;
        if (quotient < SPARSE_VALUE_ESCAPE) continue;
        put_le(p, quotient, size);
        p += size;
    }
    out->low = p;
    return true;
}

// Write symbols and low parts of all groups to the scratch memory. Return false if there is no room.
INLINE bool put_groups(const Input *in, int size, SparseGroups *all, Streams *out) {
    SparseCounts counts = {0};
    if (in->has_keys) {
        count_keys(in, size, &counts);
    } else {
        counts.members[0] = (u32)in->n, counts.sampled[0] = (u32)((in->n + SAMPLED - 1) / SAMPLED);
        counts.changed[0] = (u32)count_changed(in->source, in->base, size, in->n, in->n);
    }
    all->count = make_groups(&counts, all->groups, all->of_key);
    place_changes(all);
    // changes, symbols of gaps and of values; and the low parts behind them
    const size_t of_changes = all->changes * change_bytes(size);
    if (in->scratch_bytes < of_changes + all->gaps + all->values) return false;
    out->gaps = in->scratch + of_changes, out->values = out->gaps + all->gaps;
    out->low = out->first_low = out->values + all->values, out->low_end = in->scratch + in->scratch_bytes;
    size_t changed = 0;
    for (u32 g = 0; g < all->count; g++) changed += all->groups[g].changed;
    const SparseGroup *first = &all->groups[all->of_key[0]];
    if ((!in->has_keys || all->count == 1) && first->gap_shift != SPARSE_DENSE)
        collect_one(in, size, first);
    else if (changed < in->n / FEW)
        collect(in, size, all, true);
    else
        collect(in, size, all, false);
    for (u32 g = 0; g < all->count; g++) {
        choose_shifts(&all->groups[g], in->scratch, size);
        if (!put_group(&all->groups[g], in->scratch, size, out)) return false;
    }
    return true;
}

#define PUT_GROUPS(SIZE)                                                                                     \
    static bool put_groups_##SIZE(const Input *in, SparseGroups *all, Streams *out) {                        \
        return put_groups(in, SIZE, all, out);                                                               \
    }
PUT_GROUPS(1)
PUT_GROUPS(2)
PUT_GROUPS(4)
PUT_GROUPS(8)

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
    if (n > SPARSE_MOST_ELEMENTS) return false;
    const Input in = {source, base, n, layout == LAYOUT_ROTATED, scratch, scratch_bytes};
    Streams streams = {0};
    bool (*const put)(const Input *, SparseGroups *, Streams *) = size == 1   ? put_groups_1
                                                                  : size == 2 ? put_groups_2
                                                                  : size == 4 ? put_groups_4
                                                                              : put_groups_8;
    if (!put(&in, all, &streams) || !put_payload(all, &streams, out, room, w, tables)) return false;
    const size_t low_bytes = (size_t)(streams.low - streams.first_low);
    if (low_bytes + 8 > room - w->bytes) return false;  // a blob is padded to 8 bytes
    memcpy(out + w->bytes, streams.first_low, low_bytes);
    w->bytes += low_bytes;
    return true;
}
