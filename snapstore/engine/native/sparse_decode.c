// Sparse deltas back to chunks (docs/format.md, "Sparse deltas"): one pass over the elements of the base counts
// the members of each group, and stops at those that changed. sparse_encode.c writes them.
#include "native.h"

#define MOST_GAP_SHIFT 26
#define NEVER UINT64_MAX

// A group that is being read: where its next symbols and low parts are.
typedef struct {
    const u8 *gaps, *gaps_end, *values, *values_end;
    const u8 *bits, *gap_escapes, *low, *value_escapes;
    u64 bit;  // the next one in `bits`
    int gap_shift, low_bytes;
    bool is_dense;
} Reading;

typedef struct {
    Reading groups[256];
    u64 until[256];  // members of the group before the next one that changed
    u8 of_key[256];
    u32 count;
    const u8 *end;  // of the payload
    u64 most;       // that an element holds
    int size;
    bool is_valid;
} Readings;

// Read `bits`, at most 26, from bit `at` on, the highest first.
INLINE u64 bits_at(const u8 *data, const u8 *end, u64 at, int bits) {
    u64 word = 0;
    const u8 *p = data + (at >> 3);
    if (end - p >= 8) return __builtin_bswap64(load64(p)) << (at & 7) >> (64 - bits);
    for (int i = 0; i < 5; i++) word = word << 8 | (p + i < end ? p[i] : 0);  // 40 bits
    return word >> (40 - (at & 7) - (u64)bits) & ((1ull << bits) - 1);
}

// Return the members before the next one of the group that changed.
INLINE u64 next_gap(Readings *all, Reading *g) {
    if (g->is_dense) return g->values < g->values_end ? 0 : NEVER;
    if (g->gaps == g->gaps_end) return NEVER;
    u64 quotient = *g->gaps / 3;
    if (quotient >= SPARSE_GAP_ESCAPE) {
        quotient = load32(g->gap_escapes);
        g->gap_escapes += 4;
    }
    u64 gap = quotient << g->gap_shift;
    if (g->gap_shift) gap |= bits_at(g->bits, all->end, g->bit, g->gap_shift);
    g->bit += (u64)g->gap_shift;
    if (gap >= SPARSE_MOST_ELEMENTS) all->is_valid = false;
    return gap;
}

// Return the next value of a group.
INLINE u64 next_value(Readings *all, Reading *g) {
    u64 quotient = *g->values++;
    const int left = all->size - g->low_bytes;
    if (quotient == SPARSE_VALUE_ESCAPE) {
        quotient = get_le(g->value_escapes, all->size);
        g->value_escapes += all->size;
        if (left < 8 && quotient >> 8 * left) all->is_valid = false;
    }
    if (!g->low_bytes) return quotient;
    const u64 value = quotient << 8 * g->low_bytes | get_le(g->low, g->low_bytes);
    g->low += g->low_bytes;
    return value;
}

// Return the summand of the element that changed next in a group, and move on.
static u64 next_step(Readings *all, u32 number) {
    Reading *g = &all->groups[number];
    u64 zigzag;
    if (g->is_dense) {
        zigzag = next_value(all, g);
    } else {
        const u8 kind = *g->gaps++ % 3;
        zigzag = kind < SPARSE_OTHER ? kind + 1u : next_value(all, g) + 3;
        if (zigzag < 3 ? kind == SPARSE_OTHER : zigzag > all->most) all->is_valid = false;
    }
    all->until[number] = next_gap(all, g);
    return zigzag >> 1 ^ (0 - (zigzag & 1));
}

#define APPLY(T, BITS)                                                                                       \
    typedef T __attribute__((aligned(1), may_alias)) sparse_##BITS;                                          \
    static void apply_##BITS(Readings *all, int layout, u8 *out, size_t n) {                                 \
        sparse_##BITS *x = (sparse_##BITS *)out;                                                             \
        const u64 only = all->of_key[0];                                                                     \
        if (layout == LAYOUT_BYTES || all->count == 1) { /* from one changed element to the next */          \
            u64 i = 0;                                                                                       \
            while (all->until[only] < n - i && all->is_valid) {                                              \
                i += all->until[only];                                                                       \
                x[i] = (T)(x[i] + next_step(all, (u32)only));                                                \
                i++;                                                                                         \
            }                                                                                                \
            if (all->until[only] != NEVER) all->until[only] -= n - i;                                        \
            else if (i < n) all->until[only] = NEVER - 1;                                                    \
            return;                                                                                          \
        }                                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                     \
            const u32 g = all->of_key[sparse_key(x[i], BITS)];                                               \
            if (__builtin_expect(all->until[g]-- == 0, 0)) x[i] = (T)(x[i] + next_step(all, g));             \
        }                                                                                                    \
    }
APPLY(u8, 8)
APPLY(u16, 16)
APPLY(u32, 32)
APPLY(u64, 64)

// Read the table of groups, as `sparse_decode._read_groups` checks it. Return its end in the payload; 0: it is not
// valid.
static size_t read_groups(const SparseDelta *d, size_t n, Readings *all, size_t *gaps, size_t *values) {
    if (d->bytes < 4 || n > SPARSE_MOST_ELEMENTS) return 0;
    const u32 count = load32(d->payload);
    if (count < 1 || count > 256 || d->bytes - 4 < (size_t)count * SPARSE_GROUP_BYTES) return 0;
    u32 first_key = 0;
    *gaps = *values = 0;
    for (u32 i = 0; i < count; i++) {
        const u8 *row = d->payload + 4 + i * SPARSE_GROUP_BYTES;
        const u32 last_key = row[0], gap_shift = row[1], value_shift = row[2], c = load32(row + 4), v = load32(row + 8);
        const bool is_dense = gap_shift == SPARSE_DENSE;
        if (last_key < first_key || row[3] > 1 || value_shift % 8 || value_shift >= 8 * (u32)d->size) return 0;
        if (is_dense ? c != 0 : gap_shift > MOST_GAP_SHIFT) return 0;
        if (c > n - *gaps || v > n - *values) return 0;
        *gaps += c, *values += v;
        all->groups[i] = (Reading){.gap_shift = is_dense ? 0 : (int)gap_shift,
                                   .low_bytes = (int)value_shift / 8,
                                   .is_dense = is_dense};
        memset(all->of_key + first_key, (int)i, last_key + 1 - first_key);
        first_key = last_key + 1;
    }
    if (first_key != 256 || d->payload[4 + (count - 1) * SPARSE_GROUP_BYTES + 3] != 1) return 0;
    all->count = count;
    return 4 + (size_t)count * SPARSE_GROUP_BYTES;
}

// Decode the frames of `symbols` symbols to `out`. Move `at` and `used` behind them.
static bool read_frames(const SparseDelta *d, size_t symbols, u8 *out, size_t *at, u32 *used, DecodeTables *tables) {
    for (size_t from = 0; from < symbols; from += d->block_bytes) {
        const size_t count = symbols - from < d->block_bytes ? symbols - from : d->block_bytes;
        if (*used == d->frames) return false;
        const size_t length = load32(d->lengths + 4 * (size_t)(*used)++);
        if (length > d->bytes - *at) return false;
        if (!decode_frame(d->payload + *at, length, out + from, count, tables)) return false;
        *at += length;
    }
    return true;
}

// Decode all frames; gaps begin at `room`, values behind them.
static bool read_symbols(const SparseDelta *d, Readings *all, u8 *room, size_t gaps, size_t *at, DecodeTables *tables) {
    u8 *gaps_at = room, *values_at = room + gaps;
    size_t own_gaps = 0, own_values = 0;
    u32 used = 0;
    for (u32 i = 0; i < all->count; i++) {
        const u8 *row = d->payload + 4 + i * SPARSE_GROUP_BYTES;
        Reading *g = &all->groups[i];
        g->gaps = gaps_at + own_gaps, g->values = values_at + own_values;
        own_gaps += load32(row + 4), own_values += load32(row + 8);
        g->gaps_end = gaps_at + own_gaps, g->values_end = values_at + own_values;
        if (!row[3]) continue;
        if (!read_frames(d, own_gaps, gaps_at, at, &used, tables)) return false;
        if (!read_frames(d, own_values, values_at, at, &used, tables)) return false;
        gaps_at += own_gaps, values_at += own_values;
        own_gaps = own_values = 0;
    }
    return used == d->frames;
}

// Find the low parts of all groups, which begin at `at`, and check that the payload ends with them.
static bool place_low_parts(const SparseDelta *d, Readings *all, size_t at) {
    size_t left = d->bytes - at;
    const u8 *p = d->payload + at;
    for (u32 i = 0; i < all->count; i++) {
        Reading *g = &all->groups[i];
        const size_t c = (size_t)(g->gaps_end - g->gaps), v = (size_t)(g->values_end - g->values);
        size_t gap_escapes = 0, others = 0, value_escapes = 0;
        for (const u8 *s = g->gaps; s < g->gaps_end; s++) {
            if (*s > 3 * SPARSE_GAP_ESCAPE + SPARSE_OTHER) return false;
            gap_escapes += *s >= 3 * SPARSE_GAP_ESCAPE;
            others += *s % 3 == SPARSE_OTHER;
        }
        for (const u8 *s = g->values; s < g->values_end; s++) value_escapes += *s == SPARSE_VALUE_ESCAPE;
        if (!g->is_dense && others != v) return false;
        const size_t sizes[4] = {(c * (size_t)g->gap_shift + 7) / 8, 4 * gap_escapes, (size_t)g->low_bytes * v,
                                 (size_t)all->size * value_escapes};
        const u8 **parts[4] = {&g->bits, &g->gap_escapes, &g->low, &g->value_escapes};
        for (int k = 0; k < 4; k++) {
            if (sizes[k] > left) return false;
            *parts[k] = p;
            p += sizes[k], left -= sizes[k];
        }
    }
    return left == 0;
}

bool apply_sparse(const SparseDelta *d, const u8 *base, u8 *out, size_t n, u8 *room, size_t room_bytes,
                  DecodeTables *tables) {
    Readings all;
    all.size = d->size, all.is_valid = true, all.end = d->payload + d->bytes;
    all.most = UINT64_MAX >> (64 - 8 * d->size);
    size_t gaps, values, at = read_groups(d, n, &all, &gaps, &values);
    if (!at || gaps + values > room_bytes) return false;
    if (!read_symbols(d, &all, room, gaps, &at, tables) || !place_low_parts(d, &all, at)) return false;
    for (u32 i = 0; i < all.count; i++) all.until[i] = next_gap(&all, &all.groups[i]);
    if (base != out) memcpy(out, base, n * (size_t)d->size);
    switch (d->size) {
    case 1: apply_8(&all, d->layout, out, n); break;
    case 2: apply_16(&all, d->layout, out, n); break;
    case 4: apply_32(&all, d->layout, out, n); break;
    default: apply_64(&all, d->layout, out, n);
    }
    for (u32 i = 0; i < all.count; i++) {  // it names no element beyond its group, and a dense one names all
        const Reading *g = &all.groups[i];
        if (g->gaps != g->gaps_end || g->values != g->values_end) return false;
        if (g->is_dense && all.until[i] != NEVER) return false;
    }
    return all.is_valid;
}
