// The hot loops of the CPU engine, which jobs.c calls for spans of chunks.
//
//   xxh3.c, xxh3.h     XXH3-128 and XXH3-64: digests of chunks, checksums of blobs
//   planes.c           chunks to byte planes and back, and differences from a base
//   sample.c           statistics of sampled elements; the number of elements that differ from a base
//   choice.c           how to store a chunk, by these statistics
//   code_lengths.c     lengths of Huffman codes for counts
//   huffman_tree.h     trees of zstd frames: codes, and the description of a tree in the frame
//   huffman_tree.c     the tree of a frame that is written
//   huffman_encode.c   a block to one zstd frame of Huffman-coded literals
//   huffman_decode.c   such a frame back to its block
//   deflate_encode.c   a block of mostly one value to a deflate stream of literals and runs
//   deflate_decode.c   such a stream back to its block
//   sparse_encode.c    the elements that changed to the payload of a sparse delta
//   sparse_decode.c    such a payload and its base back to the chunk
//   blob.c             a chunk to a blob; a chain of blobs to a chunk
//   stream_copy.c      copies past the cache
//   arguments.c        what Python passes: columns of positions in memories
//   jobs.c             spans of chunks that the threads of the engine take one after the other
//   module.c           the functions that Python calls
//
// Functions take pointers and lengths that the caller has checked, keep no state, and call nothing of Python;
// only the last three files do. docs/format.md, "Blob", defines all formats. A function that may decline
// returns 0 or false: then the caller takes the reference in Python, which does the work or raises the error.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native engine needs a little-endian machine, and GCC or Clang"
#endif

#if defined(__x86_64__)
#define HAS_AVX2_CODE 1
#define AVX2 __attribute__((target("avx2,bmi,bmi2")))
#else
#define HAS_AVX2_CODE 0
#endif
#define INLINE static inline __attribute__((always_inline))
// What headers need that the CUDA kernels include as well; memory.cuh has it for these.
#define SHARED static inline
#define TABLE static const

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

INLINE u16 load16(const u8 *p) {
    u16 value;
    memcpy(&value, p, sizeof value);
    return value;
}
INLINE u32 load32(const u8 *p) {
    u32 value;
    memcpy(&value, p, sizeof value);
    return value;
}
INLINE u64 load64(const u8 *p) {
    u64 value;
    memcpy(&value, p, sizeof value);
    return value;
}
INLINE void store64(u8 *p, u64 value) { memcpy(p, &value, sizeof value); }
INLINE void put_le(u8 *p, u64 value, int bytes) { memcpy(p, &value, (size_t)bytes); }
INLINE u64 get_le(const u8 *p, int bytes) {
    u64 value = 0;
    memcpy(&value, p, (size_t)bytes);
    return value;
}
INLINE u32 high_bit(u32 value) { return 31 - (u32)__builtin_clz(value); }

// Whether to use AVX2: the machine has it, and no test has switched it off.
extern bool use_avx2;

// -- xxh3.c

u64 xxh3_64(const u8 *data, size_t bytes);  // seed 0
// The digest of a chunk as stored: 16 bytes, big-endian.
void xxh3_digest(const u8 *data, size_t bytes, u64 seed, u8 out[16]);

// -- planes.c

enum { LAYOUT_BYTES, LAYOUT_ROTATED };
// How an element and the element of its base become one number: zigzag of the difference, or exclusive or. The
// transforms of blobs have the same numbers.
enum { NONE, DIFFERENCE, XOR };
#define MAX_PLANES 8

// Elements: their size in bytes (1, 2, 4 or 8), how they are rotated, and how they relate to a base.
typedef struct {
    int size, layout, mode;
} Elements;

// Split n elements into planes[0] to planes[size - 1], n bytes each. A difference has layout LAYOUT_BYTES.
void split_planes(const u8 *source, const u8 *base, Elements elements, size_t n, u8 *const *planes);
// The inverse; `base` and `out` may be the same.
void merge_planes(const u8 *const *planes, const u8 *base, Elements elements, size_t n, u8 *out);

// -- sample.c

// The elements of a sample are fewer than this.
#define MOST_SAMPLED 8192

// Sums over the histogram of a sampled plane; see `planes.statistics_of`.
typedef struct {
    i64 total, terms, distinct, top;
} PlaneSums;

// Sum up over the planes of the elements that `planes.sample` takes, (size,). `terms`: MOST_SAMPLED terms of an
// entropy, by counts.
void sample_planes(const u8 *source, const u8 *base, Elements elements, size_t n, const i64 *terms,
                   PlaneSums *sums);
// Return how many of n elements differ; if they are more than `most`, return any number above `most`.
u64 count_changed(const u8 *source, const u8 *base, int size, size_t n, u64 most);

// -- choice.c

#define BLOB_HEADER_BYTES 80

// The kinds of planes, as in plane_kinds.py. Planes with repeats are coded only if all of their bytes are
// equal.
enum { NOISE, SKEWED, RUNS, REPEATS };

// How to store a chunk: as a sparse delta if it takes at most `most` bytes; else as a delta in planes, or full.
typedef struct {
    bool is_sparse, is_delta;
    bool is_declined;  // the reference encodes it
    u8 kinds[MAX_PLANES];
    i64 most;
} Choice;

// Choose for n elements. `elements.mode`: of a delta, DIFFERENCE or XOR; `limit`: the most bytes of a delta.
Choice choose(const u8 *chunk, const u8 *base, Elements elements, size_t n, i64 limit, const i64 *terms);

// -- code_lengths.c

// Set the lengths of the codes of at most 288 symbols, at most `most` bits (up to 15), 0 for no code. Return
// the longest. A single symbol gets a code of 1 bit. Each count is below 2^23.
u32 code_lengths(const u32 *counts, u32 symbols, u32 most, u8 *lengths);

// -- huffman_tree.c

#include "huffman_tree.h"

typedef struct {
    u8 lengths[256];     // of the code of each symbol [bits]; 0: no code
    u32 codes[256];      // code | length << 16
    u32 max_bits;
    u32 description_bytes;  // 0: there is none
    u8 description[DESCRIPTION_BYTES];
} Tree;

// Make the tree for counts of at least two symbols.
void make_tree(const u32 counts[256], Tree *tree);

// -- huffman_encode.c

#define BLOCK_BYTES 65536
// A frame may take this many bytes more than its block. So many more may be overwritten behind it.
#define FRAME_SLACK 64

typedef struct {
    u32 pairs[65536];  // the codes of two neighbouring symbols << 8 | their length
} EncodeTables;

// Write a block of 1 to BLOCK_BYTES bytes as a zstd frame. Return its length. Add to `repeating` how many of
// its words of 8 bytes repeat the word before and have one value.
size_t encode_frame(const u8 *block, u32 bytes, u8 *out, EncodeTables *tables, u64 *repeating);

// -- huffman_decode.c

typedef struct {
    // by the next bits: up to four symbols | their bits << 32 | their number << 40
    u64 entries[1 << MAX_BITS];
    u16 single[1 << MAX_BITS];   // one symbol | its bits << 8
} DecodeTables;

// Decode a frame to exactly `bytes` bytes. Return whether it is one that this decoder reads, and valid.
bool decode_frame(const u8 *frame, size_t frame_bytes, u8 *out, size_t bytes, DecodeTables *tables);

// -- deflate_encode.c

#define TOKENS (256 + 258 + 1)  // literals, and runs by their lengths

typedef struct {
    u16 tokens[BLOCK_BYTES];
    u32 coded[TOKENS];  // the bits of each token << 8 | their number
} RunTables;

// Write a block of 1 to BLOCK_BYTES bytes as a deflate stream. Return its length; 0 if it would not shrink.
// Up to 8 bytes behind it may be overwritten.
size_t encode_runs(const u8 *block, u32 bytes, u8 *out, RunTables *tables);

// -- deflate_decode.c

typedef struct {
    u16 table[1 << 15];  // by the next bits: a symbol << 4 | the length of its code
} RunDecodeTables;

// Decode a stream to exactly `bytes` bytes. Return whether it is one that this decoder reads, and valid.
bool decode_runs(const u8 *stream, size_t stream_bytes, u8 *out, size_t bytes, RunDecodeTables *tables);

// -- sparse_encode.c, sparse_decode.c; the numbers are those of sparse.py

#define SPARSE_MOST_ELEMENTS (1u << 24)
#define SPARSE_GROUP_BYTES 12
#define SPARSE_GAP_ESCAPE 84
#define SPARSE_VALUE_ESCAPE 255
#define SPARSE_DENSE 255
enum { SPARSE_OTHER = 2 };

// The key of an element of `bits` bits in layout LAYOUT_ROTATED: the byte that holds its exponent.
INLINE u32 sparse_key(u64 element, int bits) {
    if (bits == 8) return (u32)((element << 1 | element >> 7) & 255);
    return (u32)(element >> (bits - 9) & 255);
}

typedef struct {
    const u8 *payload;
    size_t bytes;
    const u8 *lengths;  // of the frames, u32 each
    u32 frames, block_bytes;
    int size, layout;
} SparseDelta;

// A group that is being written.
typedef struct {
    u32 last_key, changed, members, begin;  // begin: of its changes
    u32 gap_shift, low_bytes;
    u32 gaps, values;        // numbers of symbols
    u32 gaps_at, values_at;  // where its symbols begin
    u32 counts[2][256];      // of the symbols of gaps, and of values
} SparseGroup;

typedef struct {
    SparseGroup groups[256];
    u8 of_key[256];  // the group of each key
    u32 count;
    u32 changes, gaps, values;  // places for changes, symbols of gaps and of values; of all groups
} SparseGroups;

// A chunk has at most this many frames: two of each group, and one for each BLOCK_BYTES more of both streams.
#define SPARSE_MOST_FRAMES (2 * 256 + 2 * (SPARSE_MOST_ELEMENTS / BLOCK_BYTES))
typedef struct {
    size_t bytes;  // of the payload so far
    u32 frames;
    u8 lengths[4 * SPARSE_MOST_FRAMES];
    u64 repeating;  // see encode_frame
} SparseWriter;

// Write the payload of a sparse delta to `out`. Return false if there is not enough memory, or there are more than
// SPARSE_MOST_ELEMENTS: then the reference must write it.
bool encode_sparse(const u8 *source, const u8 *base, int size, int layout, size_t n, u8 *out, size_t room,
                   u8 *scratch, size_t scratch_bytes, SparseWriter *w, SparseGroups *all, EncodeTables *tables);

// Fill `out` with the chunk of a sparse delta to `base`, which may be the same memory. Return whether the payload
// is one that this decoder reads, and valid. `room`: for two symbols of each element that changed.
bool apply_sparse(const SparseDelta *delta, const u8 *base, u8 *out, size_t n, u8 *room, size_t room_bytes,
                  DecodeTables *tables);

// -- stream_copy.c

// Shorter copies go through the cache.
#define STREAMED_BYTES 65536
// Copy to memory that does not overlap.
void copy_past_cache(u8 *out, const u8 *data, size_t bytes);

// -- blob.c

typedef struct {
    union {
        EncodeTables encode;
        DecodeTables decode;
        RunTables runs;
        RunDecodeTables decode_runs;
    };
    SparseGroups sparse;
    SparseWriter sparse_writer;
    u8 planes[];  // of one chunk, and FRAME_SLACK; or what sparse deltas need
} Scratch;
// Scratch memory that a call needs for each byte of its longest chunk; if it may write sparse deltas of
// elements of this size.
#define SCRATCH_PER_BYTE 2
#define SPARSE_SCRATCH_PER_BYTE(size) ((size) <= 2 ? 6u : 4u)

// A blob is declined if zstd, which finds runs, might save more than this share of it.
#define MATCHES_SAVE (1.0 / 512)

typedef struct {
    const u8 *source, *base;  // base: not NULL for a delta
    size_t bytes;
    int element_size, layout, mode;  // mode: NONE without a base
    const u8 *kinds;          // of each plane
    const u8 *digest, *base_digest;
} EncodeRow;

#define ENTRY_BYTES 96
// Write a blob to `out` and its entry, without its offset. Return its length; 0: it is declined, or `room`
// might not suffice.
size_t encode_blob(const EncodeRow *row, u8 *out, size_t room, u8 *entry, Scratch *scratch);

// Write a sparse delta of at most `most` bytes, in the same way; SIZE_MAX: it would be larger.
size_t encode_sparse_blob(const EncodeRow *row, size_t most, u8 *out, size_t room, u8 *entry, Scratch *scratch);

typedef struct {
    const u8 *data;
    size_t bytes;
} Stored;

// Rebuild a chunk from `count` blobs, newest first. Return whether all are blobs that this decoder reads,
// valid, and the chunk has the digest. `each`: the digests of the chunks of all blobs, 16 bytes each, which are
// verified too; NULL: only the newest is.
bool decode_chain(const Stored *blobs, size_t count, const u8 *base, const u8 *digest, const u8 *each, u64 seed,
                  u8 *out, size_t bytes, Scratch *scratch);
