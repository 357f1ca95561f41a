// A block to one raw deflate stream (RFC 1951): a dynamic block of literals and of runs, which are matches at
// distance 1. For planes of mostly one value, runs take fewer bits than a code for each byte.
#include "native.h"

#define END 256          // the symbol that ends a block
#define SYMBOLS 286      // literals, the end, lengths of matches
#define LENGTH_CODES 19  // symbols of the code for code lengths
#define MIN_RUN 3
#define MAX_RUN 258
#define SHORTEST_RUN 6    // of the most frequent value: shorter ones take fewer bits as literals
// The most bytes of a header, and what a write may put behind it.
#define HEADER_BYTES ((17 + 3 * LENGTH_CODES + 14 * (SYMBOLS + 1)) / 8 + 16)

// -- tokens

// Return how many bytes from p on are equal to `value`, up to `most`.
INLINE u32 run_length(const u8 *p, u8 value, u32 most) {
    const u64 wanted = value * 0x0101010101010101ull;
    u32 n = 0;
    for (; n + 8 <= most; n += 8) {
        const u64 other = load64(p + n) ^ wanted;
        if (other) return n + ((u32)__builtin_ctzll(other) >> 3);
    }
    while (n < most && p[n] == value) n++;
    return n;
}

// Return the value that is most frequent in a sample of a block.
static u8 most_frequent(const u8 *block, u32 bytes) {
    u16 counts[256] = {0};
    u32 most = 0;
    for (u32 i = 0; i < bytes; i += 1 + bytes / 1024) counts[block[i]]++;
    for (u32 value = 1; value < 256; value++)
        if (counts[value] > counts[most]) most = value;
    return (u8)most;
}

// Cut a block into tokens: a literal, or RUN + the length of a run of the byte before. Return their number.
#define RUN 256
static u32 make_tokens(const u8 *block, u32 bytes, u16 *tokens) {
    const u8 frequent = most_frequent(block, bytes);
    u32 count = 0, at = 0;
    tokens[count++] = block[at++];
    while (at < bytes) {
        const u8 value = block[at - 1];
        u32 run = block[at] == value ? run_length(block + at, value, bytes - at) : 0;
        if (run < (value == frequent ? SHORTEST_RUN : MIN_RUN)) {
            for (u32 i = 0; i < run; i++) tokens[count++] = value;
            at += run;
            if (at < bytes) tokens[count++] = block[at++];
            continue;
        }
        at += run;
        for (; run > MAX_RUN + MIN_RUN; run -= MAX_RUN) tokens[count++] = RUN + MAX_RUN;
        if (run > MAX_RUN) {
            tokens[count++] = (u16)(RUN + run - MIN_RUN);
            run = MIN_RUN;
        }
        tokens[count++] = (u16)(RUN + run);
    }
    return count;
}

// The symbol of the length of a run, and how many of its lowest bits follow (3.2.5).
typedef struct {
    u32 symbol, extra_bits, extra;
} Length;

static Length length_of(u32 run) {
    if (run == MAX_RUN) return (Length){285, 0, 0};
    const u32 x = run - MIN_RUN;
    if (x < 8) return (Length){257 + x, 0, 0};
    const u32 bits = high_bit(x) - 2;
    return (Length){257 + 4 * bits + (x >> bits), bits, x & ((1u << bits) - 1)};
}

// -- bits

typedef struct {
    u8 *out;
    u64 held;
    u32 fill;
} BitWriter;

INLINE void put_bits(BitWriter *w, u64 value, u32 bits) {
    w->held |= value << w->fill;
    w->fill += bits;
}
INLINE void flush_bits(BitWriter *w) {  // leaves at most 7 bits; writes up to 8 bytes
    store64(w->out, w->held);
    w->out += w->fill >> 3;
    w->held >>= w->fill & ~7u;
    w->fill &= 7;
}

// Number the codes: the shortest first, those of equal length in the order of their symbols (3.2.2). The
// highest bit of a code comes first, so codes are reversed.
static void assign_codes(const u8 *lengths, u32 symbols, u32 *codes) {
    u32 of_length[16] = {0}, next[16] = {0}, code = 0;
    for (u32 s = 0; s < symbols; s++) of_length[lengths[s]]++;
    of_length[0] = 0;
    for (u32 bits = 1; bits < 16; bits++) next[bits] = code = (code + of_length[bits - 1]) << 1;
    for (u32 s = 0; s < symbols; s++) {
        u32 reversed = 0, own = lengths[s] ? next[lengths[s]]++ : 0;
        for (u32 i = 0; i < lengths[s]; i++, own >>= 1) reversed = reversed << 1 | (own & 1);
        codes[s] = reversed;
    }
}

// -- the header of a block (3.2.7)

// Code lengths as symbols: 0 to 15, or a repetition: 16 of the last length, 17 and 18 of zeros.
typedef struct {
    u32 count;
    u8 symbols[SYMBOLS + 1], extra[SYMBOLS + 1];
} Lengths;

static void put_length(Lengths *lengths, u32 symbol, u32 extra) {
    lengths->symbols[lengths->count] = (u8)symbol;
    lengths->extra[lengths->count++] = (u8)extra;
}

static void shorten_lengths(const u8 *plain, u32 n, Lengths *lengths) {
    lengths->count = 0;
    for (u32 i = 0; i < n;) {
        const u32 run = run_length(plain + i, plain[i], n - i);
        u32 left = run;
        if (!plain[i])
            for (u32 some; left >= 3; left -= some) {
                some = left < 138 ? left : 138;
                put_length(lengths, some < 11 ? 17 : 18, some < 11 ? some - 3 : some - 11);
            }
        else {
            put_length(lengths, plain[i], 0);
            left--;
            for (u32 some; left >= 3; left -= some) {
                some = left < 6 ? left : 6;
                put_length(lengths, 16, some - 3);
            }
        }
        for (; left; left--) put_length(lengths, plain[i], 0);
        i += run;
    }
}

// Write the code lengths of symbols and of the only distance.
static void put_header(BitWriter *w, const u8 *plain) {
    static const u8 ORDER[LENGTH_CODES] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    Lengths lengths;
    u8 all[SYMBOLS + 1], of_lengths[LENGTH_CODES];
    u32 counts[LENGTH_CODES] = {0}, codes[LENGTH_CODES], symbols = SYMBOLS, described = LENGTH_CODES;
    while (!plain[symbols - 1]) symbols--;  // at least END has a code
    memcpy(all, plain, symbols);
    all[symbols] = 1;  // the code of distance 1
    shorten_lengths(all, symbols + 1, &lengths);
    for (u32 i = 0; i < lengths.count; i++) counts[lengths.symbols[i]]++;
    code_lengths(counts, LENGTH_CODES, 7, of_lengths);
    assign_codes(of_lengths, LENGTH_CODES, codes);
    while (described > 4 && !of_lengths[ORDER[described - 1]]) described--;
    put_bits(w, 1 | 2 << 1, 3);  // the last block, with its own codes
    put_bits(w, symbols - 257, 5);
    put_bits(w, 0, 5);
    put_bits(w, described - 4, 4);
    for (u32 i = 0; i < described; i++) {
        flush_bits(w);
        put_bits(w, of_lengths[ORDER[i]], 3);
    }
    for (u32 i = 0; i < lengths.count; i++) {
        const u32 s = lengths.symbols[i];
        flush_bits(w);
        put_bits(w, codes[s], of_lengths[s]);
        put_bits(w, lengths.extra[i], s < 16 ? 0 : s == 16 ? 2 : s == 17 ? 3 : 7);
    }
    flush_bits(w);
}

// -- a stream

// Count the symbols of tokens.
static void count_symbols(const u16 *tokens, u32 n, u32 *of_tokens, u32 counts[SYMBOLS]) {
    memset(of_tokens, 0, sizeof(u32) * TOKENS);
    for (u32 i = 0; i < n; i++) of_tokens[tokens[i]]++;
    memcpy(counts, of_tokens, sizeof(u32) * 256);
    memset(counts + 256, 0, sizeof(u32) * (SYMBOLS - 256));
    counts[END] = 1;
    for (u32 run = MIN_RUN; run <= MAX_RUN; run++) counts[length_of(run).symbol] += of_tokens[RUN + run];
}

// Set the bits of each token: of a run with its distance, 0, in one bit. Return how many bits all tokens
// take.
static u64 code_tokens(const u32 *of_tokens, const u8 *lengths, u32 *coded) {
    u32 codes[SYMBOLS];
    u64 total = lengths[END];
    assign_codes(lengths, SYMBOLS, codes);
    for (u32 s = 0; s < 256; s++) coded[s] = codes[s] << 8 | lengths[s];
    for (u32 run = MIN_RUN; run <= MAX_RUN; run++) {
        const Length length = length_of(run);
        const u32 bits = lengths[length.symbol];
        const u32 code = codes[length.symbol] | length.extra << bits;
        coded[RUN + run] = code << 8 | (bits + length.extra_bits + 1);
    }
    for (u32 t = 0; t < TOKENS; t++) total += (u64)of_tokens[t] * (coded[t] & 255);
    coded[END] = codes[END] << 8 | lengths[END];
    return total;
}

size_t encode_runs(const u8 *block, u32 bytes, u8 *out, RunTables *tables) {
    u32 counts[SYMBOLS], of_tokens[TOKENS];
    u8 lengths[SYMBOLS];
    const u32 n = make_tokens(block, bytes, tables->tokens);
    count_symbols(tables->tokens, n, of_tokens, counts);
    code_lengths(counts, SYMBOLS, 15, lengths);
    u32 *coded = tables->coded;
    memset(coded, 0, sizeof tables->coded);
    const u64 bits = code_tokens(of_tokens, lengths, coded);
    u8 header[HEADER_BYTES];
    BitWriter w = {header, 0, 0};
    put_header(&w, lengths);
    const size_t header_bytes = (size_t)(w.out - header);
    if (8 * header_bytes + w.fill + bits > 8 * ((u64)bytes - 1)) return 0;
    memcpy(out, header, header_bytes);
    w.out = out + header_bytes;
    const u16 *t = tables->tokens, *end = t + n;
    for (; end - t >= 2; t += 2) {
        const u32 a = coded[t[0]], b = coded[t[1]];
        put_bits(&w, a >> 8, a & 255);
        put_bits(&w, b >> 8, b & 255);
        flush_bits(&w);
    }
    if (t < end) put_bits(&w, coded[*t] >> 8, coded[*t] & 255);
    flush_bits(&w);
    put_bits(&w, coded[END] >> 8, coded[END] & 255);
    flush_bits(&w);
    return (size_t)(w.out - out) + (w.fill > 0);
}
