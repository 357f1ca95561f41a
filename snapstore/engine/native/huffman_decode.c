// A zstd frame (RFC 8878) of one block without sequences back to its bytes: Huffman-coded literals in one or
// four streams, a raw block, or RLE. huffman_encode.c writes no other frames; for skewed noise, zstd writes
// hardly any other.
//
// It refuses every frame that is not exactly of this form, or that zstd refuses: each stream must end with
// its last symbol. It reads nothing beyond the frame and writes nothing beyond its output, whatever the bytes
// are.
#include "native.h"

#define STREAMS 4
#define PER_LOOKUP 4   // symbols of an entry, at most
#define LOOKUPS 5      // of MAX_BITS each: 55 bits, and at most 7 that are left, fit into 64
#define PER_STEP (PER_LOOKUP * LOOKUPS)

enum { RAW_BLOCK, RLE_BLOCK, COMPRESSED_BLOCK };

// -- tables

static void make_single(const u8 *weights, u32 symbols, u32 log, u16 *single) {
    u32 next[MAX_BITS + 2] = {0}, start = 0;
    for (u32 s = 0; s < symbols; s++) next[weights[s]] += 1u << weights[s] >> 1;
    for (u32 w = 1; w <= log; w++) {
        const u32 count = next[w];
        next[w] = start;
        start += count;
    }
    for (u32 s = 0; s < symbols; s++) {
        const u32 w = weights[s], count = 1u << w >> 1;
        const u16 entry = (u16)(s | (log + 1 - w) << 8);
        for (u32 i = 0; w && i < count; i++) single[next[w] + i] = entry;
        if (w) next[w] += count;
    }
}

// Join as many symbols as their codes fit into `log` bits, up to PER_LOOKUP.
static void make_entries(DecodeTables *tables, u32 log) {
    const u32 size = 1u << log, mask = size - 1;
    for (u32 i = 0; i < size; i++) {
        u32 bits = tables->single[i] >> 8, symbols = tables->single[i] & 255, count = 1;
        for (; count < PER_LOOKUP; count++) {
            const u32 next = tables->single[i << bits & mask];
            if (bits + (next >> 8) > log) break;
            symbols |= (next & 255) << (8 * count);
            bits += next >> 8;
        }
        tables->entries[i] = symbols | (u64)bits << 32 | (u64)count << 40;
    }
}

// -- streams

// A stream is read from its end. `held` are 8 bytes at `at`; their highest `used` bits are done.
typedef struct {
    const u8 *begin, *at;
    u64 held;
    u32 used;
    u8 *out, *end;
} Stream;

INLINE void step_lookup(Stream *s, const u64 *entries, u32 shift) {
    const u64 entry = entries[s->held << s->used >> shift];
    const u32 symbols = (u32)entry;
    memcpy(s->out, &symbols, 4);
    s->used += (u32)(entry >> 32) & 255;
    s->out += entry >> 40;
}
INLINE void refill(Stream *s) {
    s->at -= s->used >> 3;
    s->used &= 7;
    s->held = load64(s->at);
}
// Return how many steps stay within the stream and within the output.
INLINE size_t safe_steps(const Stream *s) {
    const size_t in = (size_t)(s->at - s->begin) / 8, out = (size_t)(s->end - s->out) / PER_STEP;
    return in < out ? in : out;
}

INLINE void fast_four(Stream streams[STREAMS], const u64 *entries, u32 shift) {
    Stream a = streams[0], b = streams[1], c = streams[2], d = streams[3];
    for (;;) {
        size_t steps = safe_steps(&a), other;
        if ((other = safe_steps(&b)) < steps) steps = other;
        if ((other = safe_steps(&c)) < steps) steps = other;
        if ((other = safe_steps(&d)) < steps) steps = other;
        if (!steps) break;
        while (steps--) {
            for (int i = 0; i < LOOKUPS; i++) {
                step_lookup(&a, entries, shift);
                step_lookup(&b, entries, shift);
                step_lookup(&c, entries, shift);
                step_lookup(&d, entries, shift);
            }
            refill(&a);
            refill(&b);
            refill(&c);
            refill(&d);
        }
    }
    streams[0] = a, streams[1] = b, streams[2] = c, streams[3] = d;
}

INLINE void fast_one(Stream *stream, const u64 *entries, u32 shift) {
    Stream s = *stream;
    for (size_t steps; (steps = safe_steps(&s)) > 0;)
        while (steps--) {
            for (int i = 0; i < LOOKUPS; i++) step_lookup(&s, entries, shift);
            refill(&s);
        }
    *stream = s;
}

// Decode the rest of a stream of `bytes` bytes, of which `left` bits are left, one symbol at a time. Return
// whether it ends with its last symbol.
static bool finish(const u8 *begin, size_t bytes, i64 left, u8 *out, const u8 *end, const u16 *single,
                   u32 log) {
    for (; out < end; out++) {
        const i64 low = left - (i64)log;
        const size_t at = low > 0 ? (size_t)low / 8 : 0, there = bytes - at < 4 ? bytes - at : 4;
        u64 window = there == 4 ? load32(begin + at) : get_le(begin + at, (int)there);
        window = low >= 0 ? window >> (low % 8) : window << -low;  // bits below the first are 0
        const u32 entry = single[window & ((1u << log) - 1)];
        *out = (u8)entry;
        left -= entry >> 8;
        if (left < 0) return false;
    }
    return left == 0;
}

INLINE bool decode_streams(const u8 *const *in, const size_t *sizes, u32 count, u8 *out, size_t bytes,
                           const DecodeTables *tables, u32 log) {
    Stream streams[STREAMS];
    i64 left[STREAMS];
    const size_t share = (bytes + count - 1) / count;
    bool fast = true;
    for (u32 i = 0; i < count; i++) {
        const u8 mark = in[i][sizes[i] - 1];
        if (!mark) return false;
        const size_t first = i * share, last = first + share < bytes ? first + share : bytes;
        left[i] = 8 * ((i64)sizes[i] - 1) + (i64)high_bit(mark);
        streams[i] = (Stream){.begin = in[i], .out = out + first, .end = out + last};
        if (sizes[i] < 8) {
            fast = false;
            continue;
        }
        streams[i].at = in[i] + sizes[i] - 8;
        streams[i].held = load64(streams[i].at);
        streams[i].used = 8 - high_bit(mark);
    }
    if (fast && count == STREAMS) fast_four(streams, tables->entries, 64 - log);
    for (u32 i = 0; i < count; i++) {
        Stream *s = &streams[i];
        if (sizes[i] >= 8) {
            fast_one(s, tables->entries, 64 - log);
            left[i] = 8 * (s->at - s->begin) + 64 - (i64)s->used;
        }
        if (!finish(in[i], sizes[i], left[i], s->out, s->end, tables->single, log)) return false;
    }
    return true;
}

typedef bool Decode(const u8 *const *in, const size_t *sizes, u32 count, u8 *out, size_t bytes,
                    const DecodeTables *tables, u32 log);
#if HAS_AVX2_CODE
AVX2 static bool decode_streams_bmi2(const u8 *const *in, const size_t *sizes, u32 count, u8 *out,
                                     size_t bytes, const DecodeTables *tables, u32 log) {
    return decode_streams(in, sizes, count, out, bytes, tables, log);
}
#endif
static bool decode_streams_plain(const u8 *const *in, const size_t *sizes, u32 count, u8 *out, size_t bytes,
                                 const DecodeTables *tables, u32 log) {
    return decode_streams(in, sizes, count, out, bytes, tables, log);
}

// -- frames

// Decode literals: a tree and its streams, `size` bytes at p. With four streams, the sizes of three precede
// them.
static bool decode_tree(const u8 *p, size_t size, u32 count, u8 *out, size_t bytes, DecodeTables *tables) {
    FseDecoder fse;
    u8 weights[256];
    u32 symbols, log;
    const size_t described = read_weights(&fse, p, (u32)size, weights, &symbols, &log);
    if (!described) return false;
    const u8 *in[STREAMS];
    size_t sizes[STREAMS], jumps = count == STREAMS ? 6 : 0, at = described + jumps;
    for (u32 i = 0; i < count; i++) {
        if (at >= size) return false;
        sizes[i] = i + 1 < count ? load16(p + described + 2 * i) : size - at;
        if (!sizes[i] || sizes[i] > size - at) return false;
        in[i] = p + at;
        at += sizes[i];
    }
    make_single(weights, symbols, log, tables->single);
    make_entries(tables, log);
    Decode *decode = decode_streams_plain;
#if HAS_AVX2_CODE
    if (use_avx2) decode = decode_streams_bmi2;
#endif
    return decode(in, sizes, count, out, bytes, tables, log);
}

// Decode a compressed block of `size` bytes whose literals are all of its content (RFC 8878, 3.1.1.3).
static bool decode_block(const u8 *p, size_t size, u8 *out, size_t bytes, DecodeTables *tables) {
    if (size < 5 || size > bytes || p[size - 1]) return false;  // the last byte: no sequences
    const u64 header = get_le(p, 5);
    const u32 form = header >> 2 & 3, bits = form < 2 ? 10 : form == 2 ? 14 : 18;
    const size_t head = form < 2 ? 3 : form == 2 ? 4 : 5, mask = ((size_t)1 << bits) - 1;
    const size_t plain = header >> 4 & mask, coded = header >> (4 + bits) & mask;
    if ((header & 3) != 2 || plain != bytes || head + coded + 1 != size || coded >= bytes) return false;
    const u32 count = form ? STREAMS : 1;
    if (count == STREAMS && (bytes < 6 || coded < 10)) return false;
    return decode_tree(p + head, coded, count, out, bytes, tables);
}

bool decode_frame(const u8 *frame, size_t frame_bytes, u8 *out, size_t bytes, DecodeTables *tables) {
    if (bytes == 0 || bytes > 0xFFFF + 256) return false;
    const int content = bytes < 256 ? 1 : 2;
    const size_t at = 8 + (size_t)content;
    if (frame_bytes <= at || load32(frame) != 0xFD2FB528u || frame[4] != (content == 1 ? 0x20 : 0x60))
        return false;
    if (get_le(frame + 5, content) != (content == 1 ? bytes : bytes - 256)) return false;
    const u32 header = (u32)get_le(frame + at - 3, 3), kind = header >> 1 & 3;
    const size_t block_bytes = header >> 3, left = frame_bytes - at;
    if (!(header & 1)) return false;  // not the last block
    if (kind == RAW_BLOCK && block_bytes == bytes && left == bytes) {
        memcpy(out, frame + at, bytes);
        return true;
    }
    if (kind == RLE_BLOCK && block_bytes == bytes && left == 1) {
        memset(out, frame[at], bytes);
        return true;
    }
    return kind == COMPRESSED_BLOCK && block_bytes == left &&
           decode_block(frame + at, left, out, bytes, tables);
}
