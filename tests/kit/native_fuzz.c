// Fuzzes the C sources of the CPU engine, for a build with sanitizers: tests/unit/test_native_sanitized.py
// compiles and runs it. Every buffer has a malloc of its own and its exact size, so that the sanitizer sees
// each byte beyond it.
//
// Usage: native_fuzz SEED ROUNDS; ends with 1 and a message if a result is wrong.
#include <stdio.h>
#include <stdlib.h>

#include "native.h"

bool use_avx2 = false;
static u64 state;

static u32 draw(u32 below) {  // xorshift64
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (u32)(state >> 32) % below;
}

static void fail(const char *what) {
    fprintf(stderr, "native_fuzz: %s\n", what);
    exit(1);
}

static void *room(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) fail("out of memory");
    return p;
}

static u8 *copy_of(const u8 *data, size_t bytes) { return memcpy(room(bytes), data, bytes); }

static u8 *content(size_t bytes) {
    u8 *data = room(bytes);
    const u32 kind = draw(4), values = 1 + draw(256), rare = 1 + draw(30);
    u8 last = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (kind == 0) last = (u8)draw(256);
        if (kind == 1) last = (u8)(draw(values) * draw(values) / 256);
        if (kind == 2) last = draw(rare) ? 0 : (u8)draw(values);
        if (kind == 3 && !draw(rare)) last = (u8)draw(values);
        data[i] = last;
    }
    return data;
}

// Return a copy with some bytes changed, and of another length sometimes.
static u8 *damage(const u8 *data, size_t *bytes) {
    if (!draw(8)) *bytes = draw((u32)*bytes + 1);
    u8 *bad = copy_of(data, *bytes);
    const size_t most = draw(2) ? 100 : 400;  // where headers, trees and groups lie
    const size_t head = *bytes < most ? *bytes : most;
    for (u32 i = draw(4); i > 0 && *bytes; i--)
        bad[draw(3) ? draw((u32)head) : draw((u32)*bytes)] ^= (u8)(1 << draw(8));
    return bad;
}

static size_t some_length(size_t most) { return 1 + draw(draw(2) ? 300 : (u32)most); }

static void fuzz_block(Scratch *scratch) {
    const size_t bytes = some_length(draw(20) ? 5000 : BLOCK_BYTES);
    const bool runs = draw(2);
    u64 repeating = 0;
    u8 *block = content(bytes), *out = room(bytes + FRAME_SLACK), *back = room(bytes);
    const size_t length = runs ? encode_runs(block, (u32)bytes, out, &scratch->runs)
                               : encode_frame(block, (u32)bytes, out, &scratch->encode, &repeating);
    u8 *stored = copy_of(out, length);
    if (length) {
        const bool done = runs ? decode_runs(stored, length, back, bytes, &scratch->decode_runs)
                               : decode_frame(stored, length, back, bytes, &scratch->decode);
        if (!done || memcmp(block, back, bytes)) fail("a block differs");
    }
    for (int i = 0; i < 20 && length; i++) {
        size_t size = length;
        u8 *bad = damage(stored, &size);
        if (runs)
            decode_runs(bad, size, back, bytes, &scratch->decode_runs);
        else
            decode_frame(bad, size, back, bytes, &scratch->decode);
        free(bad);
    }
    free(block), free(out), free(back), free(stored);
}

// Damage a blob, make its checksum right again, and rebuild its chunk.
static void decode_damaged(const u8 *stored, size_t length, const u8 *base, const u8 *digest, u8 *out,
                           size_t bytes, Scratch *scratch) {
    size_t size = length;
    u8 *bad = damage(stored, &size);
    if (size >= 16) store64(bad + 8, xxh3_64(bad + 16, size - 16));
    const Stored blob = {bad, size};
    decode_chain(&blob, 1, base, digest, draw(2) ? digest : NULL, 0, out, bytes, scratch);
    free(bad);
}

static void fuzz_blob(void) {
    const int size = 1 << draw(4);
    const size_t elements = some_length(draw(20) ? 3000 : 70000), bytes = elements * (size_t)size;
    const size_t blocks = 1 + (size_t)size * (1 + elements / BLOCK_BYTES);
    const size_t needed = 80 + bytes + (FRAME_SLACK + 4) * blocks + 8;
    const bool is_delta = draw(2);
    u8 *chunk = content(bytes), *base = content(bytes), *out = room(needed), *back = room(bytes);
    u8 digest[16], base_digest[16], entry[ENTRY_BYTES], kinds[MAX_PLANES];
    Scratch *scratch = room(sizeof(Scratch) + SCRATCH_PER_BYTE * bytes + FRAME_SLACK);
    PlaneSums *sums = room(sizeof(PlaneSums) * (size_t)size);
    static i64 terms[MOST_SAMPLED];
    xxh3_digest(chunk, bytes, 0, digest);
    xxh3_digest(base, bytes, 0, base_digest);
    for (int k = 0; k < MAX_PLANES; k++) kinds[k] = (u8)draw(3);
    const int mode = is_delta ? (draw(2) ? DIFFERENCE : XOR) : NONE, layout = (int)draw(2);
    const EncodeRow row = {chunk, is_delta ? base : NULL, bytes, size, layout, mode, kinds, digest, base_digest};
    sample_planes(chunk, row.base, (Elements){size, mode == DIFFERENCE ? 0 : layout, mode}, elements, terms, sums);
    if (is_delta && count_changed(chunk, base, size, elements, elements) > elements) fail("too many changes");
    const size_t length = encode_blob(&row, out, needed, entry, scratch);
    if (length > needed) fail("a blob is too long");
    const size_t little = draw((u32)needed);  // mostly too little room
    u8 *little_out = room(little);
    encode_blob(&row, little_out, little, entry, scratch);
    free(little_out);
    encode_blob(&row, out, needed, entry, scratch);
    u8 *stored = copy_of(out, length);
    const Stored blob = {stored, length};
    const bool done = decode_chain(&blob, 1, row.base, digest, NULL, 0, back, bytes, scratch);
    if (length && (!done || memcmp(chunk, back, bytes)))
        fail("a chunk differs");
    for (int i = 0; i < 30 && length; i++)
        decode_damaged(stored, length, row.base, digest, back, bytes, scratch);
    free(chunk), free(base), free(out), free(back), free(scratch), free(sums), free(stored);
}

static long sparse_deltas[4];  // read back whole, by the logarithm of the element size

// Change some elements of a base; write them as a sparse delta, and read it whole and damaged.
static void fuzz_sparse(void) {
    const u32 size_bits = draw(4);
    const int size = 1 << size_bits;
    const size_t elements = some_length(draw(20) ? 3000 : 140000), bytes = elements * (size_t)size;
    const size_t needed = 80 + bytes + 16 * 1024, planes_bytes = SPARSE_SCRATCH_PER_BYTE(size) * bytes + FRAME_SLACK;
    u8 *base = content(bytes), *chunk = copy_of(base, bytes), *out = room(needed), *back = room(bytes);
    u8 digest[16], base_digest[16], entry[ENTRY_BYTES], kinds[MAX_PLANES] = {0};
    Scratch *scratch = room(sizeof(Scratch) + planes_bytes);
    Scratch *reading = room(sizeof(Scratch) + SCRATCH_PER_BYTE * bytes);
    const u32 one_in = 1 + draw(draw(2) ? 4 : 300), far = draw(3);
    for (size_t i = 0; i < elements; i++)
        if (!draw(one_in)) chunk[i * (size_t)size] ^= (u8)(far ? 1 + draw(255) : 1);
    for (size_t i = 0; far == 2 && i < bytes; i++)
        if (!draw(one_in)) chunk[i] ^= (u8)draw(256);
    xxh3_digest(chunk, bytes, 0, digest);
    xxh3_digest(base, bytes, 0, base_digest);
    const EncodeRow row = {chunk, base, bytes, size, (int)draw(2), DIFFERENCE, kinds, digest, base_digest};
    const size_t little = draw((u32)needed);  // mostly too little room
    u8 *little_out = room(little);
    encode_sparse_blob(&row, needed, little_out, little, entry, scratch);
    free(little_out);
    const size_t few = draw((u32)planes_bytes);  // and too little scratch memory
    u8 *few_planes = room(few);
    scratch->sparse_writer.frames = 0;
    encode_sparse(chunk, base, size, row.layout, elements, out, needed, few_planes, few, &scratch->sparse_writer,
                  &scratch->sparse, &scratch->encode);
    free(few_planes);
    scratch->sparse_writer.frames = 0;
    const bool done = encode_sparse(chunk, base, size, row.layout, elements, out, needed, scratch->planes, planes_bytes,
                                    &scratch->sparse_writer, &scratch->sparse, &scratch->encode);
    if (!done && 2 * count_changed(chunk, base, size, elements, elements) <= elements)
        fail("too little scratch memory");
    encode_sparse_blob(&row, draw((u32)needed), out, needed, entry, scratch);
    const size_t length = encode_sparse_blob(&row, needed, out, needed, entry, scratch);
    if (length && length != SIZE_MAX) {
        u8 *stored = copy_of(out, length);
        const Stored blob = {stored, length};
        if (!decode_chain(&blob, 1, base, digest, digest, 0, back, bytes, reading) || memcmp(chunk, back, bytes))
            fail("a chunk differs from its sparse delta");
        sparse_deltas[size_bits]++;
        for (int i = 0; i < 60; i++) decode_damaged(stored, length, base, digest, back, bytes, reading);
        free(stored);
    }
    free(chunk), free(base), free(out), free(back), free(scratch), free(reading);
}

int main(int count, char **arguments) {
    if (count != 3) fail("expected SEED ROUNDS");
    state = strtoull(arguments[1], NULL, 10) * 2654435769u + 1;
    Scratch *scratch = room(sizeof(Scratch));
    for (long rounds = strtol(arguments[2], NULL, 10); rounds > 0; rounds--) {
#if HAS_AVX2_CODE
        use_avx2 = rounds % 2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#endif
        fuzz_block(scratch);
        if (rounds % 3 == 0) fuzz_blob();
        if (rounds % 3 == 1) fuzz_sparse();
    }
    for (int i = 0; i < 4 && strtol(arguments[2], NULL, 10) >= 300; i++)
        if (sparse_deltas[i] < 5) fail("too few sparse deltas");
    free(scratch);
    return 0;
}
