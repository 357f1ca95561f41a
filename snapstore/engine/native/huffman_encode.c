// A block of bytes to one zstd frame (RFC 8878): a single segment with its content size, of one block, which
// holds Huffman-coded literals and no sequences. Every zstd decoder reads it. The literals are in four
// streams, in short blocks in one. A block that does not shrink becomes a raw block; a block of one value
// becomes RLE.
#include "native.h"

#define STREAMS 4
#define ONE_STREAM_BELOW 1024  // the sizes of four streams would take 6 bytes
#define MIN_BYTES 32           // shorter blocks stay raw
// With more symbols, the table of pairs costs more than it saves.
#define PAIRED_SYMBOLS 64

enum { RAW_BLOCK, RLE_BLOCK, COMPRESSED_BLOCK };

// Count the bytes of a block by value. Return how many words of 8 bytes repeat the word before, and have one
// value: a coder that finds such runs needs fewer bits than a code for single bytes.
static u32 count_bytes(const u8 *data, size_t bytes, u32 counts[256]) {
    u32 tables[8][256];  // so that equal neighbours do not wait for each other
    memset(tables, 0, sizeof tables);
    size_t i = 0;
    u32 repeating = 0;
    u64 previous = 0;
    for (; i + 8 <= bytes; i += 8) {
        const u64 x = load64(data + i);
        repeating += x == previous && x == (x & 255) * 0x0101010101010101ull;
        previous = x;
        for (int k = 0; k < 8; k++) tables[k][x >> (8 * k) & 255]++;
    }
    for (; i < bytes; i++) tables[0][data[i]]++;
    for (int s = 0; s < 256; s++) {
        counts[s] = 0;
        for (int k = 0; k < 8; k++) counts[s] += tables[k][s];
    }
    return repeating;
}

// Write magic, descriptor, content size and the header of the only block (RFC 8878, 3.1.1). Return their
// length.
static u32 put_frame_header(u8 *out, u32 length, u32 type, u32 block_bytes) {
    const int content = length < 256 ? 1 : 2;
    put_le(out, 0xFD2FB528u, 4);
    out[4] = content == 1 ? 0x20 : 0x60;
    put_le(out + 5, content == 1 ? length : length - 256, content);
    put_le(out + 5 + content, 1 | type << 1 | block_bytes << 3, 3);
    return 8 + (u32)content;
}

// Bits that are written to a stream, the lowest first. A stream is read from its end: so its last symbol is
// the first.
typedef struct {
    u8 *out;
    u64 held;
    u32 fill;
} Stream;

INLINE void put_code(Stream *s, u64 code, u32 bits) {
    s->held |= code << s->fill;
    s->fill += bits;
}
INLINE void flush_stream(Stream *s) {  // leaves at most 7 bits; writes up to 8 bytes
    store64(s->out, s->held);
    s->out += s->fill >> 3;
    s->held >>= s->fill & ~7u;
    s->fill &= 7;
}

// Write the codes of a span, with an end mark. Return the end of the stream.
INLINE u8 *put_stream(const u8 *first, const u8 *last, const u32 *codes, const u32 *pairs, u8 *out) {
    Stream s = {out, 0, 0};
    const u8 *p = last;
    if (pairs)
        for (; p - first >= 8; p -= 8) {
            const u64 x = load64(p - 8);
            for (int k = 48; k >= 0; k -= 32) {
                const u32 a = pairs[x >> k & 0xFFFF], b = pairs[x >> (k - 16) & 0xFFFF];
                put_code(&s, (u64)(a >> 8) | (u64)(b >> 8) << (a & 63), (a & 255) + (b & 255));
                flush_stream(&s);
            }
        }
    for (; p - first >= 4; p -= 4) {
        for (int k = 1; k <= 4; k++) put_code(&s, codes[p[-k]] & 0xFFFF, codes[p[-k]] >> 16);
        flush_stream(&s);
    }
    for (; p > first; p--) {
        put_code(&s, codes[p[-1]] & 0xFFFF, codes[p[-1]] >> 16);
        flush_stream(&s);
    }
    put_code(&s, 1, 1);
    flush_stream(&s);
    return s.out + (s.fill > 0);
}

#if HAS_AVX2_CODE
AVX2 static u8 *put_stream_bmi2(const u8 *first, const u8 *last, const u32 *codes, const u32 *pairs,
                                u8 *out) {
    return put_stream(first, last, codes, pairs, out);
}
#endif
static u8 *put_stream_plain(const u8 *first, const u8 *last, const u32 *codes, const u32 *pairs, u8 *out) {
    return put_stream(first, last, codes, pairs, out);
}

// Prepare the codes of all pairs of symbols. The second symbol of a pair is written first.
static const u32 *make_pairs(const Tree *tree, const u8 *symbols, int present, EncodeTables *tables) {
    for (int j = 0; j < present; j++) {
        const u32 second = tree->codes[symbols[j]], bits = second >> 16;
        u32 *row = tables->pairs + ((u32)symbols[j] << 8);
        for (int i = 0; i < present; i++) {
            const u32 first = tree->codes[symbols[i]];
            row[symbols[i]] = ((second & 0xFFFF) | (first & 0xFFFF) << bits) << 8 | (bits + (first >> 16));
        }
    }
    return tables->pairs;
}

// Write the streams of a block. Return their end; the sizes of all but the last go to `sizes`.
static u8 *put_streams(const u8 *block, u32 bytes, u32 count, const Tree *tree, const u32 *pairs, u8 *sizes,
                       u8 *out) {
    const u32 share = (bytes + count - 1) / count;
    u8 *(*put)(const u8 *, const u8 *, const u32 *, const u32 *, u8 *) = put_stream_plain;
#if HAS_AVX2_CODE
    if (use_avx2) put = put_stream_bmi2;
#endif
    for (u32 i = 0; i < count; i++) {
        const u32 first = i * share, last = first + share < bytes ? first + share : bytes;
        u8 *end = put(block + first, block + last, tree->codes, pairs, out);
        if (i + 1 < count) put_le(sizes + 2 * i, (u64)(end - out), 2);
        out = end;
    }
    return out;
}

// Write a block of Huffman-coded literals. Return the length of the frame; 0 if the block would not shrink.
static size_t encode_literals(const u8 *block, u32 bytes, const u32 counts[256], const Tree *tree, u8 *out,
                              EncodeTables *tables) {
    u8 symbols[256];
    int present = 0;
    u64 bits = 0;
    for (int s = 0; s < 256; s++)
        if (counts[s]) {
            symbols[present++] = (u8)s;
            bits += (u64)counts[s] * tree->lengths[s];
        }
    // the header of the literals (4.1.1): its length, and the bits of each of its two sizes
    const u32 head = bytes < 1024 ? 3 : bytes < 16384 ? 4 : 5;
    const u32 size_bits = head == 3 ? 10 : head == 4 ? 14 : 18;
    const u32 count = bytes < ONE_STREAM_BELOW ? 1 : STREAMS, jumps = 2 * (count - 1);
    const u32 at = bytes < 256 ? 9 : 10;
    const u32 sizes_at = at + head + tree->description_bytes, streams_at = sizes_at + jumps;
    if (!tree->description_bytes || streams_at + bits / 8 + count + 1 >= at + bytes) return 0;
    const bool paired = present <= PAIRED_SYMBOLS && bytes >= 64u * (u32)present;
    const u32 *pairs = paired ? make_pairs(tree, symbols, present, tables) : NULL;
    u8 *end = put_streams(block, bytes, count, tree, pairs, out + sizes_at, out + streams_at);
    *end++ = 0;  // no sequences
    const u32 total = (u32)(end - out);
    if (total - at >= bytes) return 0;
    put_frame_header(out, bytes, COMPRESSED_BLOCK, total - at);
    const u64 literals = total - at - head - 1, form = count == 1 ? 0 : head - 2;
    put_le(out + at, 2 | form << 2 | (u64)bytes << 4 | literals << (4 + size_bits), (int)head);
    memcpy(out + at + head, tree->description, tree->description_bytes);
    return total;
}

size_t encode_frame(const u8 *block, u32 bytes, u8 *out, EncodeTables *tables, u64 *repeating) {
    u32 counts[256];
    const u32 words = count_bytes(block, bytes, counts);
    if (counts[block[0]] == bytes) {
        const u32 at = put_frame_header(out, bytes, RLE_BLOCK, bytes);
        out[at] = block[0];
        return at + 1;
    }
    if (bytes >= MIN_BYTES) {
        Tree tree;
        make_tree(counts, &tree);
        *repeating += words;
        const size_t coded = encode_literals(block, bytes, counts, &tree, out, tables);
        if (coded) return coded;
    }
    const u32 at = put_frame_header(out, bytes, RAW_BLOCK, bytes);
    memcpy(out + at, block, bytes);
    return at + bytes;
}
