// Planes: plane k holds byte k of every element (docs/format.md, "Blob"). Before they are split, elements are
// replaced by their difference from a base; or XORed with those of a base or not, and rotated left by one bit
// (LAYOUT_ROTATED) or not.
//
// The plain code works in tiles that fit into the first-level cache, in loops that compilers vectorise.
// Elements of 2 and 4 bytes, the most frequent ones, have code for AVX2.
#include "native.h"

#if HAS_AVX2_CODE
#include <immintrin.h>
#endif

#define TILE 1024  // elements

// Code for one type of elements. `T` is the type of an element, `S` the same, signed; `U` is T without
// alignment.
#define DEFINE(T, S, BITS)                                                                                   \
    typedef T __attribute__((aligned(1), may_alias)) unaligned_##BITS;                                       \
    INLINE void tile_of_##BITS(const u8 *source, const u8 *base, Elements e, size_t n, T *tile) {            \
        const unaligned_##BITS *x = (const unaligned_##BITS *)source, *b = (const unaligned_##BITS *)base;   \
        if (e.mode == DIFFERENCE) {                                                                          \
            for (size_t i = 0; i < n; i++) {                                                                 \
                const T d = (T)(x[i] - b[i]);                                                                \
                tile[i] = (T)((T)(d << 1) ^ (T)((S)d >> (BITS - 1)));                                        \
            }                                                                                                \
            return;                                                                                          \
        }                                                                                                    \
        if (e.mode == XOR)                                                                                   \
            for (size_t i = 0; i < n; i++) tile[i] = (T)(x[i] ^ b[i]);                                       \
        else                                                                                                 \
            memcpy(tile, source, n * sizeof(T));                                                             \
        if (e.layout == LAYOUT_ROTATED && BITS > 8)                                                          \
            for (size_t i = 0; i < n; i++) tile[i] = (T)((T)(tile[i] << 1) | (T)(tile[i] >> (BITS - 1)));    \
    }                                                                                                        \
    INLINE void split_##BITS(const u8 *source, const u8 *base, Elements e, size_t from, size_t n,            \
                             u8 *const *planes) {                                                            \
        T tile[TILE];                                                                                        \
        for (size_t at = from; at < n; at += TILE) {                                                         \
            const size_t count = n - at < TILE ? n - at : TILE, offset = at * sizeof(T);                     \
            tile_of_##BITS(source + offset, base ? base + offset : NULL, e, count, tile);                    \
            for (int k = 0; k < BITS / 8; k++) {                                                             \
                u8 *plane = planes[k] + at;                                                                  \
                for (size_t i = 0; i < count; i++) plane[i] = (u8)(tile[i] >> (8 * k));                      \
            }                                                                                                \
        }                                                                                                    \
    }                                                                                                        \
    INLINE void put_tile_##BITS(T *tile, const u8 *base, Elements e, size_t n, u8 *out) {                    \
        unaligned_##BITS *y = (unaligned_##BITS *)out;                                                       \
        const unaligned_##BITS *b = (const unaligned_##BITS *)base;                                          \
        if (e.mode == DIFFERENCE)                                                                            \
            for (size_t i = 0; i < n; i++) tile[i] = (T)((T)(tile[i] >> 1) ^ (T)(0 - (tile[i] & 1)));        \
        else if (e.layout == LAYOUT_ROTATED && BITS > 8)                                                     \
            for (size_t i = 0; i < n; i++) tile[i] = (T)((T)(tile[i] >> 1) | (T)(tile[i] << (BITS - 1)));    \
        if (e.mode == DIFFERENCE && base == out) {                                                           \
            for (size_t i = 0; i < n; i++) y[i] = (T)(y[i] + tile[i]);                                       \
        } else if (e.mode == DIFFERENCE) {                                                                   \
            for (size_t i = 0; i < n; i++) y[i] = (T)(b[i] + tile[i]);                                       \
        } else if (e.mode == XOR) {                                                                          \
            for (size_t i = 0; i < n; i++) y[i] = (T)(b[i] ^ tile[i]);                                       \
        } else {                                                                                             \
            memcpy(out, tile, n * sizeof(T));                                                                \
        }                                                                                                    \
    }                                                                                                        \
    INLINE void merge_##BITS(const u8 *const *planes, const u8 *base, Elements e, size_t from, size_t n,     \
                             u8 *out) {                                                                      \
        T tile[TILE];                                                                                        \
        for (size_t at = from; at < n; at += TILE) {                                                         \
            const size_t count = n - at < TILE ? n - at : TILE, offset = at * sizeof(T);                     \
            for (size_t i = 0; i < count; i++) tile[i] = planes[0][at + i];                                  \
            for (int k = 1; k < BITS / 8; k++) {                                                             \
                const u8 *plane = planes[k] + at;                                                            \
                for (size_t i = 0; i < count; i++) tile[i] |= (T)((T)plane[i] << (8 * k));                   \
            }                                                                                                \
            put_tile_##BITS(tile, base ? base + offset : NULL, e, count, out + offset);                      \
        }                                                                                                    \
    }

DEFINE(u8, int8_t, 8)
DEFINE(u16, int16_t, 16)
DEFINE(u32, int32_t, 32)
DEFINE(u64, int64_t, 64)

INLINE void split_any(const u8 *source, const u8 *base, Elements e, size_t from, size_t n,
                      u8 *const *planes) {
    switch (e.size) {
    case 1: split_8(source, base, e, from, n, planes); break;
    case 2: split_16(source, base, e, from, n, planes); break;
    case 4: split_32(source, base, e, from, n, planes); break;
    default: split_64(source, base, e, from, n, planes);
    }
}

INLINE void merge_any(const u8 *const *planes, const u8 *base, Elements e, size_t from, size_t n, u8 *out) {
    switch (e.size) {
    case 1: merge_8(planes, base, e, from, n, out); break;
    case 2: merge_16(planes, base, e, from, n, out); break;
    case 4: merge_32(planes, base, e, from, n, out); break;
    default: merge_64(planes, base, e, from, n, out);
    }
}

#if HAS_AVX2_CODE
AVX2 INLINE __m256i load256(const u8 *p) { return _mm256_loadu_si256((const __m256i *)p); }
AVX2 INLINE void store256(u8 *p, __m256i x) { _mm256_storeu_si256((__m256i *)p, x); }

// Return eight elements of 4 bytes, rotated or as their relation to the base. `e` is a constant for the
// compiler.
AVX2 INLINE __m256i element_32(const u8 *source, const u8 *base, size_t at, Elements e) {
    __m256i x = load256(source + at);
    if (e.mode == DIFFERENCE) {
        const __m256i d = _mm256_sub_epi32(x, load256(base + at));
        return _mm256_xor_si256(_mm256_add_epi32(d, d), _mm256_srai_epi32(d, 31));
    }
    if (e.mode == XOR) x = _mm256_xor_si256(x, load256(base + at));
    if (e.layout == LAYOUT_ROTATED) return _mm256_or_si256(_mm256_add_epi32(x, x), _mm256_srli_epi32(x, 31));
    return x;
}

// Split 32 elements at a time; return how many elements are done.
AVX2 INLINE size_t split_32_avx2(const u8 *source, const u8 *base, Elements e, size_t n, u8 *const *planes) {
    const __m256i by_byte = _mm256_broadcastsi128_si256(
        // 4 elements to 4 words, one a plane
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i x[4];
        for (int j = 0; j < 4; j++)
            x[j] = _mm256_shuffle_epi8(element_32(source, base, 4 * i + 32 * (size_t)j, e), by_byte);
        const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
        const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
        store256(planes[0] + i, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(a, c), in_order));
        store256(planes[1] + i, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(a, c), in_order));
        store256(planes[2] + i, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(b, d), in_order));
        store256(planes[3] + i, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(b, d), in_order));
    }
    return i;
}

AVX2 INLINE __m256i element_16(const u8 *source, const u8 *base, size_t at, Elements e) {
    __m256i x = load256(source + at);
    if (e.mode == DIFFERENCE) {
        const __m256i d = _mm256_sub_epi16(x, load256(base + at));
        return _mm256_xor_si256(_mm256_add_epi16(d, d), _mm256_srai_epi16(d, 15));
    }
    if (e.mode == XOR) x = _mm256_xor_si256(x, load256(base + at));
    if (e.layout == LAYOUT_ROTATED) return _mm256_or_si256(_mm256_add_epi16(x, x), _mm256_srli_epi16(x, 15));
    return x;
}

AVX2 INLINE size_t split_16_avx2(const u8 *source, const u8 *base, Elements e, size_t n, u8 *const *planes) {
    const __m256i low = _mm256_set1_epi16(0xFF);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i a = element_16(source, base, 2 * i, e), b = element_16(source, base, 2 * i + 32, e);
        const __m256i first = _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
        const __m256i second = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        store256(planes[0] + i, _mm256_permute4x64_epi64(first, 0xD8));
        store256(planes[1] + i, _mm256_permute4x64_epi64(second, 0xD8));
    }
    return i;
}

AVX2 INLINE __m256i restored_32(__m256i x, const u8 *base, size_t at, Elements e) {
    if (e.mode == DIFFERENCE) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i sign = _mm256_sub_epi32(zero, _mm256_and_si256(x, _mm256_set1_epi32(1)));
        return _mm256_add_epi32(load256(base + at), _mm256_xor_si256(_mm256_srli_epi32(x, 1), sign));
    }
    if (e.layout == LAYOUT_ROTATED) x = _mm256_or_si256(_mm256_srli_epi32(x, 1), _mm256_slli_epi32(x, 31));
    return e.mode == XOR ? _mm256_xor_si256(x, load256(base + at)) : x;
}

AVX2 INLINE size_t merge_32_avx2(const u8 *const *planes, const u8 *base, Elements e, size_t n, u8 *out) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i p[4];  // with quarters 0, 2, 1, 3: unpacking takes halves of both lanes
        for (int k = 0; k < 4; k++) p[k] = _mm256_permute4x64_epi64(load256(planes[k] + i), 0xD8);
        const __m256i low = _mm256_unpacklo_epi8(p[0], p[1]), low2 = _mm256_unpackhi_epi8(p[0], p[1]);
        const __m256i high = _mm256_unpacklo_epi8(p[2], p[3]), high2 = _mm256_unpackhi_epi8(p[2], p[3]);
        const __m256i a = _mm256_unpacklo_epi16(low, high), b = _mm256_unpackhi_epi16(low, high);
        const __m256i c = _mm256_unpacklo_epi16(low2, high2), d = _mm256_unpackhi_epi16(low2, high2);
        const __m256i x[4] = {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31),
                              _mm256_permute2x128_si256(c, d, 0x20), _mm256_permute2x128_si256(c, d, 0x31)};
        for (size_t j = 0; j < 4; j++)
            store256(out + 4 * i + 32 * j, restored_32(x[j], base, 4 * i + 32 * j, e));
    }
    return i;
}

AVX2 INLINE __m256i restored_16(__m256i x, const u8 *base, size_t at, Elements e) {
    if (e.mode == DIFFERENCE) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i sign = _mm256_sub_epi16(zero, _mm256_and_si256(x, _mm256_set1_epi16(1)));
        return _mm256_add_epi16(load256(base + at), _mm256_xor_si256(_mm256_srli_epi16(x, 1), sign));
    }
    if (e.layout == LAYOUT_ROTATED) x = _mm256_or_si256(_mm256_srli_epi16(x, 1), _mm256_slli_epi16(x, 15));
    return e.mode == XOR ? _mm256_xor_si256(x, load256(base + at)) : x;
}

AVX2 INLINE size_t merge_16_avx2(const u8 *const *planes, const u8 *base, Elements e, size_t n, u8 *out) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i a = _mm256_permute4x64_epi64(load256(planes[0] + i), 0xD8);
        const __m256i b = _mm256_permute4x64_epi64(load256(planes[1] + i), 0xD8);
        store256(out + 2 * i, restored_16(_mm256_unpacklo_epi8(a, b), base, 2 * i, e));
        store256(out + 2 * i + 32, restored_16(_mm256_unpackhi_epi8(a, b), base, 2 * i + 32, e));
    }
    return i;
}

// Make `layout` and `mode` constants in each call of a function, so that its loop has no branches.
#define BY_MODE(CALL, SIZE)                                                                                  \
    (e.mode == DIFFERENCE        ? CALL(((Elements){SIZE, LAYOUT_BYTES, DIFFERENCE}))                        \
     : e.mode == XOR && e.layout ? CALL(((Elements){SIZE, LAYOUT_ROTATED, XOR}))                             \
     : e.mode == XOR             ? CALL(((Elements){SIZE, LAYOUT_BYTES, XOR}))                               \
     : e.layout                  ? CALL(((Elements){SIZE, LAYOUT_ROTATED, NONE}))                            \
                                 : CALL(((Elements){SIZE, LAYOUT_BYTES, NONE})))

AVX2 static void split_avx2(const u8 *source, const u8 *base, Elements e, size_t n, u8 *const *planes) {
    size_t done = 0;
#define SPLIT_32(E) split_32_avx2(source, base, E, n, planes)
#define SPLIT_16(E) split_16_avx2(source, base, E, n, planes)
    if (e.size == 4) done = BY_MODE(SPLIT_32, 4);
    if (e.size == 2) done = BY_MODE(SPLIT_16, 2);
    split_any(source, base, e, done, n, planes);
}

AVX2 static void merge_avx2(const u8 *const *planes, const u8 *base, Elements e, size_t n, u8 *out) {
    size_t done = 0;
#define MERGE_32(E) merge_32_avx2(planes, base, E, n, out)
#define MERGE_16(E) merge_16_avx2(planes, base, E, n, out)
    if (e.size == 4) done = BY_MODE(MERGE_32, 4);
    if (e.size == 2) done = BY_MODE(MERGE_16, 2);
    merge_any(planes, base, e, done, n, out);
}
#endif

static void split_plain(const u8 *source, const u8 *base, Elements e, size_t n, u8 *const *planes) {
    split_any(source, base, e, 0, n, planes);
}

static void merge_plain(const u8 *const *planes, const u8 *base, Elements e, size_t n, u8 *out) {
    merge_any(planes, base, e, 0, n, out);
}

void split_planes(const u8 *source, const u8 *base, Elements elements, size_t n, u8 *const *planes) {
#if HAS_AVX2_CODE
    if (use_avx2) {
        split_avx2(source, base, elements, n, planes);
        return;
    }
#endif
    split_plain(source, base, elements, n, planes);
}

void merge_planes(const u8 *const *planes, const u8 *base, Elements elements, size_t n, u8 *out) {
#if HAS_AVX2_CODE
    if (use_avx2) {
        merge_avx2(planes, base, elements, n, out);
        return;
    }
#endif
    merge_plain(planes, base, elements, n, out);
}
