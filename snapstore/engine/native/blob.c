// A chunk to a blob, and a chain of blobs to a chunk. docs/format.md, "Blob", has the fields of a header.
#include "native.h"

#define HEADER_BYTES BLOB_HEADER_BYTES
#define VERSION 1
enum { RAW, ZSTD, DEFLATE, SPARSE };  // codecs
static const u8 MAGIC[4] = "SNBL", NO_BASE[16];

INLINE size_t blocks_of(size_t bytes, size_t block_bytes) {
    return bytes / block_bytes + (bytes % block_bytes > 0);
}

// -- encoding

// A blob that is being written.
typedef struct {
    u8 *out;
    size_t at;       // the end of the payload so far
    u32 lengths;     // of blocks, so far
    u8 codecs[MAX_PLANES];
    u32 plane_bytes[MAX_PLANES];  // as stored
    u64 repeating;   // words of 8 bytes that repeat the word before and have one value
} Writer;

static bool is_constant(const u8 *plane, size_t n) { return !memcmp(plane, plane + 1, n - 1); }

// Append a plane in blocks of a codec. Return false and append nothing if it does not shrink.
static bool put_coded(Writer *w, int codec, const u8 *plane, size_t n, Scratch *scratch) {
    const size_t first = w->at, blocks = blocks_of(n, BLOCK_BYTES);
    for (size_t b = 0; b < blocks; b++) {
        const size_t from = b * BLOCK_BYTES, count = n - from < BLOCK_BYTES ? n - from : BLOCK_BYTES;
        u8 *out = w->out + w->at;
        const u8 *block = plane + from;
        const size_t length = codec == ZSTD
                                  ? encode_frame(block, (u32)count, out, &scratch->encode, &w->repeating)
                                  : encode_runs(block, (u32)count, out, &scratch->runs);
        if (!length) {
            w->at = first;
            return false;
        }
        put_le(w->out + HEADER_BYTES + 4 * (w->lengths + b), length, 4);
        w->at += length;
    }
    if (w->at - first + 4 * blocks >= n) {
        w->at = first;
        return false;
    }
    w->lengths += (u32)blocks;
    return true;
}

static void put_header(const EncodeRow *row, const Writer *w) {
    u8 *out = w->out;
    memset(out, 0, HEADER_BYTES);
    memcpy(out, MAGIC, 4);
    put_le(out + 4, VERSION, 2);
    out[16] = (u8)row->mode;
    out[17] = (u8)row->element_size;
    out[18] = (u8)(row->mode == DIFFERENCE && w->codecs[0] != SPARSE ? LAYOUT_BYTES : row->layout);
    put_le(out + 20, row->bytes, 4);
    put_le(out + 24, w->at - HEADER_BYTES - 4 * (size_t)w->lengths, 4);
    put_le(out + 28, BLOCK_BYTES, 4);
    memcpy(out + 32, w->codecs, MAX_PLANES);
    put_le(out + 40, w->lengths, 4);
    memcpy(out + 48, row->digest, 16);
    memcpy(out + 64, row->base ? row->base_digest : NO_BASE, 16);
    put_le(out + 8, xxh3_64(out + 16, w->at - 16), 8);
}

// Write the entry of a pack's footer (docs/format.md, "Pack"), without the offset.
static void put_entry(const EncodeRow *row, const Writer *w, u8 *entry) {
    memset(entry, 0, ENTRY_BYTES);
    put_le(entry + 8, w->at, 4);
    put_le(entry + 12, row->bytes, 4);
    memcpy(entry + 16, w->out + 16, 2);
    memcpy(entry + 24, w->codecs, MAX_PLANES);
    memcpy(entry + 32, w->out + 48, 32);
    memcpy(entry + 64, w->plane_bytes, sizeof w->plane_bytes);
}

size_t encode_blob(const EncodeRow *row, u8 *out, size_t room, u8 *entry, Scratch *scratch) {
    const int size = row->element_size;
    const size_t n = row->bytes / (size_t)size, blocks = blocks_of(n, BLOCK_BYTES);
    size_t coded = 0;
    for (int k = 0; k < size; k++) coded += row->kinds[k] != NOISE;
    const size_t start = HEADER_BYTES + 4 * blocks * coded;
    if (!n || row->bytes > UINT32_MAX / 2 || room < start + row->bytes + FRAME_SLACK * (1 + blocks * coded))
        return 0;

    Writer w = {.out = out, .at = start};
    u8 *planes[MAX_PLANES] = {0};
    bool in_place = true;  // raw planes before the first coded one are split to where they belong
    for (int k = 0; k < size; k++) {
        in_place = in_place && row->kinds[k] == NOISE;
        planes[k] = in_place ? out + start + (size_t)k * n : scratch->planes + (size_t)k * n;
    }
    const Elements elements = {size, row->mode == DIFFERENCE ? LAYOUT_BYTES : row->layout, row->mode};
    split_planes(row->source, row->base, elements, n, planes);
    for (int k = 0; k < size; k++) {
        const size_t first = w.at;
        int codec = row->kinds[k] == NOISE ? RAW : ZSTD;
        if (row->kinds[k] >= RUNS && !is_constant(planes[k], n)) codec = DEFLATE;
        if (row->kinds[k] == REPEATS && codec == DEFLATE) return 0;
        if (codec != RAW && put_coded(&w, codec, planes[k], n, scratch)) {
            w.codecs[k] = (u8)codec;
        } else {
            if (codec == DEFLATE) return 0;  // a block grows: zlib may have a better form for it
            if (planes[k] != out + w.at) memcpy(out + w.at, planes[k], n);
            w.at += n;
        }
        w.plane_bytes[k] = (u32)(w.at - first);
    }
    // a match saves a bit of each byte
    if ((double)w.repeating > MATCHES_SAVE * (double)(w.at - start)) return 0;
    // room for lengths that nobody needs
    const size_t left_out = start - HEADER_BYTES - 4 * (size_t)w.lengths;
    if (left_out) {
        memmove(out + start - left_out, out + start, w.at - start);
        w.at -= left_out;
    }
    put_header(row, &w);
    put_entry(row, &w, entry);
    return w.at;
}

size_t encode_sparse_blob(const EncodeRow *row, size_t most, u8 *out, size_t room, u8 *entry, Scratch *scratch) {
    const size_t size = (size_t)row->element_size, n = row->bytes / size;
    const size_t frames = 2 * 256 + 2 * blocks_of(n, BLOCK_BYTES), start = HEADER_BYTES + 4 * frames;
    SparseWriter *s = &scratch->sparse_writer;
    s->bytes = s->frames = 0, s->repeating = 0;
    if (!n || row->bytes > UINT32_MAX / 2 || room < start) return 0;
    if (!encode_sparse(row->source, row->base, (int)size, row->layout, n, out + start, room - start, scratch->planes,
                       SPARSE_SCRATCH_PER_BYTE(size) * row->bytes + FRAME_SLACK, s, &scratch->sparse, &scratch->encode))
        return 0;
    if ((double)s->repeating > MATCHES_SAVE * (double)s->bytes) return 0;
    Writer w = {.out = out, .lengths = s->frames, .codecs = {SPARSE}, .plane_bytes = {(u32)s->bytes}};
    w.at = HEADER_BYTES + 4 * (size_t)s->frames + s->bytes;
    if (w.at > most) return SIZE_MAX;
    memcpy(out + HEADER_BYTES, s->lengths, 4 * (size_t)s->frames);
    memmove(out + HEADER_BYTES + 4 * (size_t)s->frames, out + start, s->bytes);
    put_header(row, &w);
    put_entry(row, &w, entry);
    return w.at;
}

// -- decoding

typedef struct {
    u32 raw_bytes, payload_bytes, block_bytes, lengths;
    u8 transform, element_size, layout, codecs[MAX_PLANES], digest[16], base[16];
} Header;

// Read a header and check its fields and the length of the blob, as `blob.parse` does, without the checksum.
static bool read_header(Stored blob, Header *h) {
    const u8 *p = blob.data;
    if (blob.bytes < HEADER_BYTES || memcmp(p, MAGIC, 4) || load16(p + 4) != VERSION || load16(p + 6))
        return false;
    h->transform = p[16], h->element_size = p[17], h->layout = p[18];
    h->raw_bytes = load32(p + 20), h->payload_bytes = load32(p + 24), h->block_bytes = load32(p + 28);
    h->lengths = load32(p + 40);
    memcpy(h->codecs, p + 32, MAX_PLANES);
    memcpy(h->digest, p + 48, 16);
    memcpy(h->base, p + 64, 16);
    if (HEADER_BYTES + 4 * (u64)h->lengths + h->payload_bytes != blob.bytes) return false;
    const u32 size = h->element_size;
    if (size == 0 || size > MAX_PLANES || size & (size - 1) || h->raw_bytes % size || !h->block_bytes)
        return false;
    if (h->transform > XOR || h->layout > LAYOUT_ROTATED) return false;
    if (h->codecs[0] == SPARSE) {
        for (u32 k = 1; k < MAX_PLANES; k++)
            if (h->codecs[k]) return false;
        return h->transform == DIFFERENCE && memcmp(h->base, NO_BASE, 16);
    }
    if (h->transform == DIFFERENCE && h->layout != LAYOUT_BYTES) return false;
    if ((h->transform == NONE) != !memcmp(h->base, NO_BASE, 16)) return false;
    for (u32 k = 0; k < size; k++)
        if (h->codecs[k] > DEFLATE) return false;
    return true;
}

// Where the next plane and the next block length lie in a blob.
typedef struct {
    size_t at;
    u32 entry;
} Place;

// Decode the blocks of a plane of n bytes. Move `place` to its end.
static bool decode_plane(Stored blob, const Header *h, int codec, size_t n, Place *place, u8 *out,
                         Scratch *scratch) {
    const size_t blocks = blocks_of(n, h->block_bytes);
    if (blocks > h->lengths - place->entry) return false;
    for (size_t b = 0; b < blocks; b++, place->entry++) {
        const size_t length = load32(blob.data + HEADER_BYTES + 4 * (size_t)place->entry);
        const size_t from = b * h->block_bytes, count = n - from < h->block_bytes ? n - from : h->block_bytes;
        const u8 *block = blob.data + place->at;
        if (length > blob.bytes - place->at) return false;
        if (codec == ZSTD && !decode_frame(block, length, out + from, count, &scratch->decode)) return false;
        if (codec == DEFLATE && !decode_runs(block, length, out + from, count, &scratch->decode_runs))
            return false;
        place->at += length;
    }
    return true;
}

// Fill `out` with a blob's chunk; `base`: the chunk of its base, for a delta.
static bool apply_blob(Stored blob, const Header *h, const u8 *base, u8 *out, Scratch *scratch) {
    const size_t n = h->raw_bytes / h->element_size;
    Place place = {HEADER_BYTES + 4 * (size_t)h->lengths, 0};
    const u8 *planes[MAX_PLANES];
    if (h->codecs[0] == SPARSE) {
        const SparseDelta delta = {.payload = blob.data + place.at,
                                   .bytes = blob.bytes - place.at,
                                   .lengths = blob.data + HEADER_BYTES,
                                   .frames = h->lengths,
                                   .block_bytes = h->block_bytes,
                                   .size = h->element_size,
                                   .layout = h->layout};
        return apply_sparse(&delta, base, out, n, scratch->planes, SCRATCH_PER_BYTE * (size_t)h->raw_bytes,
                            &scratch->decode);
    }
    for (u32 k = 0; k < h->element_size; k++) {
        if (h->codecs[k] == RAW) {
            if (n > blob.bytes - place.at) return false;
            planes[k] = blob.data + place.at;
            place.at += n;
            continue;
        }
        u8 *plane = scratch->planes + k * n;
        if (!decode_plane(blob, h, h->codecs[k], n, &place, plane, scratch)) return false;
        planes[k] = plane;
    }
    if (place.at != blob.bytes || place.entry != h->lengths) return false;
    const Elements elements = {h->element_size, h->layout, h->transform};
    merge_planes(planes, base, elements, n, out);
    return true;
}

bool decode_chain(const Stored *blobs, size_t count, const u8 *base, const u8 *digest, const u8 *each, u64 seed,
                  u8 *out, size_t bytes, Scratch *scratch) {
    Header h;
    u8 expected[16], found[16];
    memcpy(expected, digest, 16);
    for (size_t i = 0; i < count; i++) {  // all headers before the first byte of `out`
        const bool is_full = i + 1 == count && !base;
        if (!read_header(blobs[i], &h) || h.raw_bytes != bytes || memcmp(h.digest, expected, 16))
            return false;
        if ((h.transform == NONE) != is_full || (each && memcmp(each + 16 * i, expected, 16))) return false;
        if (xxh3_64(blobs[i].data + 16, blobs[i].bytes - 16) != load64(blobs[i].data + 8)) return false;
        memcpy(expected, h.base, 16);
    }
    for (size_t i = count; i-- > 0; base = out) {
        if (!read_header(blobs[i], &h) || h.raw_bytes != bytes ||
            !apply_blob(blobs[i], &h, base, out, scratch))
            return false;
        if (i && !each) continue;
        xxh3_digest(out, bytes, seed, found);
        if (memcmp(found, i ? each + 16 * i : digest, 16)) return false;
    }
    return count > 0;
}
