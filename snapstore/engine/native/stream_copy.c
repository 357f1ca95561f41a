// A copy that nobody reads soon: it is written past the cache. So the old bytes need not be read from memory first, and
// what is in the cache stays there.
#include "native.h"

#if HAS_AVX2_CODE
#include <immintrin.h>

#define VECTOR 32
#define STEP (4 * VECTOR)

AVX2 static void copy_avx2(u8 *out, const u8 *data, size_t bytes) {
    const size_t head = (VECTOR - (uintptr_t)out % VECTOR) % VECTOR;
    memcpy(out, data, head);
    size_t at = head;
    for (; at + STEP <= bytes; at += STEP)
        for (int i = 0; i < STEP; i += VECTOR)
            _mm256_stream_si256((__m256i *)(out + at + i), _mm256_loadu_si256((const __m256i *)(data + at + i)));
    _mm_sfence();  // these writes are not ordered otherwise
    memcpy(out + at, data + at, bytes - at);
}
#endif

void copy_past_cache(u8 *out, const u8 *data, size_t bytes) {
#if HAS_AVX2_CODE
    if (use_avx2 && bytes >= STREAMED_BYTES) {
        copy_avx2(out, data, bytes);
        return;
    }
#endif
    memcpy(out, data, bytes);
}
