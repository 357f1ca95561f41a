// XXH3-128 under a seed, and XXH3-64 without one, as xxHash 0.8 defines them for every length; see xxh3.h.
#include "native.h"
#include "xxh3.h"

#if HAS_AVX2_CODE
#include <immintrin.h>
#endif

#define SECRET_BYTES (8 * SECRET_WORDS)
#define STRIPE_BYTES 64
#define STRIPES ((SECRET_BYTES - STRIPE_BYTES) / 8)  // of a block: each begins one word further in the secret
#define PREFETCHED 384  // bytes ahead; as in xxHash

SHARED u64 secret64(int offset) { return load64((const u8 *)SECRET + offset); }
SHARED u64 multiply_high(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }

INLINE void add_stripe(u64 acc[8], const u8 *in, const u8 *secret) {
    for (int i = 0; i < 8; i++) {
        const u64 data = load64(in + 8 * i), keyed = data ^ load64(secret + 8 * i);
        acc[i ^ 1] += data;
        acc[i] += (keyed & 0xFFFFFFFFull) * (keyed >> 32);
    }
}

static void sum_plain(u64 acc[8], const u8 *in, size_t n, const u8 *secret) {
    const size_t blocks = (n - 1) / (STRIPES * STRIPE_BYTES);
    for (size_t b = 0; b < blocks; b++, in += STRIPES * STRIPE_BYTES) {
        for (int s = 0; s < STRIPES; s++) add_stripe(acc, in + STRIPE_BYTES * s, secret + 8 * s);
        for (int i = 0; i < 8; i++) {
            acc[i] ^= acc[i] >> 47 ^ load64(secret + SECRET_BYTES - STRIPE_BYTES + 8 * i);
            acc[i] *= P32_1;
        }
    }
    n -= blocks * STRIPES * STRIPE_BYTES;
    for (size_t s = 0; s < (n - 1) / STRIPE_BYTES; s++)
        add_stripe(acc, in + STRIPE_BYTES * s, secret + 8 * s);
    add_stripe(acc, in + n - STRIPE_BYTES, secret + SECRET_BYTES - STRIPE_BYTES - 7);
}

#if HAS_AVX2_CODE
typedef struct {
    __m256i half[2];
} Accumulators;

AVX2 INLINE void add_stripe_avx2(Accumulators *acc, const u8 *in, const u8 *secret) {
    for (int h = 0; h < 2; h++) {
        const __m256i data = _mm256_loadu_si256((const __m256i *)(in + 32 * h));
        const __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)(secret + 32 * h)));
        const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        const __m256i swapped = _mm256_shuffle_epi32(data, 0x4E);  // neighbouring 64-bit words
        acc->half[h] = _mm256_add_epi64(acc->half[h], _mm256_add_epi64(product, swapped));
    }
}

AVX2 INLINE void scramble_avx2(Accumulators *acc, const u8 *secret) {
    const __m256i prime = _mm256_set1_epi64x((i64)P32_1);
    for (int h = 0; h < 2; h++) {
        __m256i x = _mm256_xor_si256(acc->half[h], _mm256_srli_epi64(acc->half[h], 47));
        x = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i *)(secret + 32 * h)));
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
        acc->half[h] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
    }
}

AVX2 static void sum_avx2(u64 sums[8], const u8 *in, size_t n, const u8 *secret) {
    Accumulators acc;
    memcpy(&acc, sums, sizeof acc);
    const size_t blocks = (n - 1) / (STRIPES * STRIPE_BYTES);
    for (size_t b = 0; b < blocks; b++, in += STRIPES * STRIPE_BYTES) {
        for (int s = 0; s < STRIPES; s++) {
            _mm_prefetch((const char *)in + STRIPE_BYTES * s + PREFETCHED, _MM_HINT_T0);
            add_stripe_avx2(&acc, in + STRIPE_BYTES * s, secret + 8 * s);
        }
        scramble_avx2(&acc, secret + SECRET_BYTES - STRIPE_BYTES);
    }
    n -= blocks * STRIPES * STRIPE_BYTES;
    for (size_t s = 0; s < (n - 1) / STRIPE_BYTES; s++)
        add_stripe_avx2(&acc, in + STRIPE_BYTES * s, secret + 8 * s);
    add_stripe_avx2(&acc, in + n - STRIPE_BYTES, secret + SECRET_BYTES - STRIPE_BYTES - 7);
    memcpy(sums, &acc, sizeof acc);
}
#endif

static void sum_stripes(u64 acc[8], const u8 *in, size_t n, const u64 *secret) {
    static const u64 START[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    memcpy(acc, START, sizeof START);
#if HAS_AVX2_CODE
    if (use_avx2) {
        sum_avx2(acc, in, n, (const u8 *)secret);
        return;
    }
#endif
    sum_plain(acc, in, n, (const u8 *)secret);
}

static u64 merge_sums(const u64 acc[8], const u8 *secret, u64 start) {
    for (int i = 0; i < 8; i += 2)
        start += fold64(acc[i] ^ load64(secret + 8 * i), acc[i + 1] ^ load64(secret + 8 * i + 8));
    return avalanche(start);
}

static Hash128 xxh3_128(const u8 *data, size_t bytes, u64 seed) {
    if (bytes <= LONG_ABOVE) return short_128(data, bytes, seed);
    u64 secret[SECRET_WORDS], acc[8];
    for (int i = 0; i < SECRET_WORDS; i++) secret[i] = SECRET[i] + (i % 2 ? 0 - seed : seed);
    sum_stripes(acc, data, bytes, secret);
    const u8 *words = (const u8 *)secret;
    return hash128(merge_sums(acc, words + 11, bytes * P64_1),
                   merge_sums(acc, words + SECRET_BYTES - STRIPE_BYTES - 11, ~(bytes * P64_2)));
}

u64 xxh3_64(const u8 *data, size_t bytes) {
    if (bytes <= LONG_ABOVE) return short_64(data, bytes);
    u64 acc[8];
    sum_stripes(acc, data, bytes, SECRET);
    return merge_sums(acc, (const u8 *)SECRET + 11, bytes * P64_1);
}

void xxh3_digest(const u8 *data, size_t bytes, u64 seed, u8 out[16]) {
    const Hash128 h = xxh3_128(data, bytes, seed);
    store64(out, swap64(h.high));
    store64(out + 8, swap64(h.low));
}
