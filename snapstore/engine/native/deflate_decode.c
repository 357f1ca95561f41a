// A raw deflate stream (RFC 1951) of literals and runs back to its block: every match is at distance 1, as
// zlib's RLE strategy and deflate_encode.c write it. It declines all other streams, and every stream that
// zlib refuses.
#include "native.h"

#define END 256
#define SYMBOLS 286
#define DISTANCES 30
#define LENGTH_CODES 19
#define MAX_CODE_BITS 15

// Reads bits, the lowest first. Bits beyond the end are 0; `left` is then negative.
typedef struct {
    const u8 *p, *end;
    u64 held;
    i64 left;  // bits of the stream that were not taken
    u32 have;  // bits that are held
} BitReader;

INLINE void refill(BitReader *r) {  // to at least 56 bits, or to all that are left
    if (r->end - r->p >= 8) {
        r->held |= load64(r->p) << r->have;
        r->p += (63 - r->have) >> 3;
        r->have |= 56;
        return;
    }
    for (; r->have <= 56 && r->p < r->end; r->have += 8) r->held |= (u64)*r->p++ << r->have;
}
INLINE void skip_bits(BitReader *r, u32 bits) {
    r->held >>= bits;
    r->have -= bits < r->have ? bits : r->have;
    r->left -= bits;
}
INLINE u32 take_bits(BitReader *r, u32 bits) {
    const u32 value = (u32)r->held & ((1u << bits) - 1);
    skip_bits(r, bits);
    return value;
}

// -- codes

// Make the table of a code: by the next bits, a symbol << 4 | the length of its code. Return the length of
// the longest code, by which the table is addressed; 0: the codes do not fill the code space, or exceed it.
static u32 make_table(const u8 *lengths, u32 symbols, u16 *table) {
    u32 of_length[16] = {0}, next[17] = {0}, space = 0, log = MAX_CODE_BITS;
    for (u32 s = 0; s < symbols; s++) of_length[lengths[s]]++;
    while (log > 1 && !of_length[log]) log--;
    for (u32 bits = 1; bits <= log; bits++) {
        next[bits + 1] = (next[bits] + of_length[bits]) << 1;
        space += of_length[bits] << (log - bits);
    }
    if (space != 1u << log) return 0;
    for (u32 s = 0; s < symbols; s++) {
        const u32 bits = lengths[s];
        if (!bits) continue;
        u32 reversed = 0, own = next[bits]++;
        for (u32 i = 0; i < bits; i++, own >>= 1) reversed = reversed << 1 | (own & 1);
        for (u32 i = reversed; i < 1u << log; i += 1u << bits) table[i] = (u16)(s << 4 | bits);
    }
    return log;
}

// Return whether only distance 1 can be used: it has the only code of distances, of 1 bit, or zlib has added
// another code of 1 bit, which no match uses.
static bool is_near(const u8 *lengths, u32 distances) {
    u32 codes = 0;
    for (u32 i = 0; i < distances; i++) {
        if (lengths[i] > 1) return false;
        codes += lengths[i];
    }
    return codes == 0 || (lengths[0] == 1 && codes <= 2);
}

// Read the code lengths of a block (3.2.7). Return the number of symbols, behind whose lengths the one of
// distance 1 lies; 0: they are not valid, or not of this form.
static u32 read_lengths(BitReader *r, u8 lengths[SYMBOLS + DISTANCES]) {
    static const u8 ORDER[LENGTH_CODES] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    u8 of_lengths[LENGTH_CODES] = {0};
    u16 table[128];
    refill(r);
    const u32 symbols = take_bits(r, 5) + 257, distances = take_bits(r, 5) + 1;
    const u32 described = take_bits(r, 4) + 4;
    if (symbols > SYMBOLS || distances > DISTANCES) return 0;
    for (u32 i = 0; i < described; i++) {
        refill(r);
        of_lengths[ORDER[i]] = (u8)take_bits(r, 3);
    }
    const u32 log = make_table(of_lengths, LENGTH_CODES, table), mask = (1u << log) - 1;
    if (!log) return 0;
    for (u32 n = 0; n < symbols + distances;) {
        refill(r);
        const u32 entry = table[r->held & mask], s = entry >> 4;
        skip_bits(r, entry & 15);
        if (s < 16) {
            lengths[n++] = (u8)s;
            continue;
        }
        if (s == 16 && n == 0) return 0;
        const u8 value = s == 16 ? lengths[n - 1] : 0;
        u32 count = s == 16 ? 3 + take_bits(r, 2) : s == 17 ? 3 + take_bits(r, 3) : 11 + take_bits(r, 7);
        if (count > symbols + distances - n) return 0;
        while (count--) lengths[n++] = value;
    }
    return r->left >= 0 && lengths[END] && is_near(lengths + symbols, distances) ? symbols : 0;
}

// -- blocks

// Return the length of a run by its symbol; 0: there is no such symbol (3.2.5).
INLINE u32 read_run(BitReader *r, u32 symbol) {
    const u32 x = symbol - 257;
    if (symbol == 285) return 258;
    if (symbol > 285) return 0;
    if (x < 8) return 3 + x;
    const u32 bits = x / 4 - 1;
    return 3 + ((4 + x % 4) << bits) + take_bits(r, bits);
}

typedef struct {
    u8 *begin, *at, *end;
} Output;

// Decode the symbols of a block up to its end. `distance_bits`: the length of the code of distance 1; 0:
// there is none.
INLINE bool decode_symbols(BitReader *r, const u16 *table, u32 log, u32 distance_bits, Output *out) {
    const u32 mask = (1u << log) - 1;
    u8 *at = out->at;
    for (;;) {
        refill(r);
        u32 entry = table[r->held & mask];
        for (int i = 0; i < 2 && entry < END << 4; i++) {  // three codes of 15 bits, and a run, are there
            if (at == out->end) return false;
            *at++ = (u8)(entry >> 4);
            skip_bits(r, entry & 15);
            entry = table[r->held & mask];
        }
        if (r->left < 0) return false;
        if (entry < END << 4) continue;
        skip_bits(r, entry & 15);
        if (entry >> 4 == END) break;
        const u32 run = read_run(r, entry >> 4);
        if (!run || !distance_bits || take_bits(r, distance_bits)) return false;  // another distance than 1
        if (at == out->begin || run > (size_t)(out->end - at)) return false;
        memset(at, at[-1], run);
        at += run;
    }
    out->at = at;
    return r->left >= 0;
}

static bool decode_stored(BitReader *r, Output *out) {
    skip_bits(r, (u32)(r->left & 7));  // to the next byte
    refill(r);
    const u32 bytes = take_bits(r, 16), check = take_bits(r, 16);
    if (r->left < 0 || (bytes ^ check) != 0xFFFF || bytes > (size_t)(out->end - out->at)) return false;
    if (8 * (i64)bytes > r->left) return false;
    const u8 *from = r->end - r->left / 8;
    memcpy(out->at, from, bytes);
    out->at += bytes;
    *r = (BitReader){from + bytes, r->end, 0, r->left - 8 * (i64)bytes, 0};
    return true;
}

static bool decode_block(BitReader *r, u32 kind, Output *out, RunDecodeTables *tables) {
    u8 lengths[288 + DISTANCES];
    if (kind == 0) return decode_stored(r, out);
    u32 symbols = 288, distance_bits = 5;
    if (kind == 1) {  // fixed codes (3.2.6)
        for (u32 s = 0; s < 288; s++) lengths[s] = s < 144 ? 8 : s < 256 ? 9 : s < 280 ? 7 : 8;
    } else if (kind == 2) {
        symbols = read_lengths(r, lengths);
        distance_bits = symbols ? lengths[symbols] : 0;
    }
    if (kind > 2 || !symbols) return false;
    const u32 log = make_table(lengths, symbols, tables->table);
    return log && decode_symbols(r, tables->table, log, distance_bits, out);
}

bool decode_runs(const u8 *stream, size_t stream_bytes, u8 *out, size_t bytes, RunDecodeTables *tables) {
    BitReader r = {stream, stream + stream_bytes, 0, 8 * (i64)stream_bytes, 0};
    Output output = {out, out, out + bytes};
    for (bool is_last = false; !is_last;) {
        refill(&r);
        is_last = take_bits(&r, 1);
        const u32 kind = take_bits(&r, 2);
        if (r.left < 0 || !decode_block(&r, kind, &output, tables)) return false;
    }
    return output.at == output.end && r.left >= 0 && r.left < 8;
}
