// XXH3 (xxHash 0.8) for up to 240 bytes: for the extension in C, and for the CUDA kernel `digest`. Specification:
// https://github.com/Cyan4973/xxHash/blob/v0.8.3/doc/xxhash_spec.md
//
// Up to 240 bytes, the seed is mixed into the words of the default secret when they are used. Beyond 240 bytes, the
// seed makes another secret: even 64-bit words plus the seed, odd words minus the seed. Each side has its own code for
// that, and defines what is declared here.

#define P32_1 0x9E3779B1ull
#define P32_2 0x85EBCA77ull
#define P32_3 0xC2B2AE3Dull
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define P64_5 0x27D4EB2F165667C5ull
#define MX1 0x165667919E3779F9ull
#define MX2 0x9FB21C651E98DF25ull

#define SECRET_WORDS 24
#define LONG_ABOVE 240

TABLE u64 SECRET[SECRET_WORDS] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};

typedef struct {
    u64 low, high;
} Hash128;

SHARED u64 secret64(int offset);            // 64 bits of the default secret, from any byte on
SHARED u64 multiply_high(u64 a, u64 b);     // the upper 64 bits of the product

SHARED Hash128 hash128(u64 low, u64 high) {
    Hash128 made;
    made.low = low;
    made.high = high;
    return made;
}
SHARED u32 secret32(int offset) { return (u32)secret64(offset); }
SHARED u64 rotate64(u64 x, int bits) { return x << bits | x >> (64 - bits); }
SHARED u32 swap32(u32 x) { return x << 24 | (x & 0xFF00) << 8 | (x >> 8 & 0xFF00) | x >> 24; }
SHARED u64 swap64(u64 x) {
    x = (x & 0x00000000FFFFFFFFull) << 32 | x >> 32;
    x = (x & 0x0000FFFF0000FFFFull) << 16 | (x >> 16 & 0x0000FFFF0000FFFFull);
    return (x & 0x00FF00FF00FF00FFull) << 8 | (x >> 8 & 0x00FF00FF00FF00FFull);
}
SHARED Hash128 multiply64(u64 a, u64 b) { return hash128(a * b, multiply_high(a, b)); }
SHARED u64 fold64(u64 a, u64 b) {
    return a * b ^ multiply_high(a, b);
}
SHARED u64 avalanche(u64 h) {
    h ^= h >> 37;
    h *= MX1;
    return h ^ h >> 32;
}
SHARED u64 avalanche64(u64 h) {  // as in XXH64
    h ^= h >> 33;
    h *= P64_2;
    h ^= h >> 29;
    h *= P64_3;
    return h ^ h >> 32;
}

// -- up to 240 bytes

SHARED u64 mix16(const u8 *in, int secret, u64 seed) {
    return fold64(load64(in) ^ (secret64(secret) + seed), load64(in + 8) ^ (secret64(secret + 8) - seed));
}
SHARED void mix32(Hash128 *acc, const u8 *a, const u8 *b, int secret, u64 seed) {
    acc->low += mix16(a, secret, seed);
    acc->low ^= load64(b) + load64(b + 8);
    acc->high += mix16(b, secret + 16, seed);
    acc->high ^= load64(a) + load64(a + 8);
}

SHARED Hash128 up_to_16_128(const u8 *in, u64 n, u64 seed) {
    if (n == 0)
        return hash128(avalanche64(seed ^ secret64(64) ^ secret64(72)),
                       avalanche64(seed ^ secret64(80) ^ secret64(88)));
    if (n <= 3) {
        const u32 low = (u32)in[0] << 16 | (u32)in[n >> 1] << 24 | in[n - 1] | (u32)n << 8;
        const u32 swapped = swap32(low), high = swapped << 13 | swapped >> 19;
        const u64 flip_low = secret32(0) ^ secret32(4), flip_high = secret32(8) ^ secret32(12);
        return hash128(avalanche64(low ^ (flip_low + seed)),
                       avalanche64(high ^ (flip_high - seed)));
    }
    if (n <= 8) {
        seed ^= (u64)swap32((u32)seed) << 32;
        const u64 keyed =
            (load32(in) + ((u64)load32(in + n - 4) << 32)) ^ ((secret64(16) ^ secret64(24)) + seed);
        Hash128 m = multiply64(keyed, P64_1 + (n << 2));
        m.high += m.low << 1;
        m.low ^= m.high >> 3;
        m.low ^= m.low >> 35;
        m.low *= MX2;
        m.low ^= m.low >> 28;
        m.high = avalanche(m.high);
        return m;
    }
    const u64 first = load64(in), last = load64(in + n - 8);
    Hash128 m = multiply64(first ^ last ^ ((secret64(32) ^ secret64(40)) - seed), P64_1);
    m.low += (n - 1) << 54;
    const u64 keyed = last ^ ((secret64(48) ^ secret64(56)) + seed);
    m.high += keyed + (keyed & 0xFFFFFFFFull) * (P32_2 - 1);
    m.low ^= swap64(m.high);
    Hash128 h = multiply64(m.low, P64_2);
    h.high += m.high * P64_2;
    return hash128(avalanche(h.low), avalanche(h.high));
}

SHARED Hash128 short_128(const u8 *in, u64 n, u64 seed) {
    if (n <= 16) return up_to_16_128(in, n, seed);
    Hash128 acc = {n * P64_1, 0};
    if (n <= 128) {
        for (int i = (int)(n - 1) / 32; i >= 0; i--)
            mix32(&acc, in + 16 * i, in + n - 16 * (i + 1), 32 * i, seed);
    } else {
        for (int i = 0; i < 128; i += 32) mix32(&acc, in + i, in + i + 16, i, seed);
        acc.low = avalanche(acc.low);
        acc.high = avalanche(acc.high);
        for (int i = 128; i + 32 <= (int)n; i += 32) mix32(&acc, in + i, in + i + 16, 3 + i - 128, seed);
        mix32(&acc, in + n - 16, in + n - 32, 136 - 17 - 16, 0 - seed);
    }
    const u64 high = acc.low * P64_1 + acc.high * P64_4 + (n - seed) * P64_2;
    return hash128(avalanche(acc.low + acc.high), 0 - avalanche(high));
}

SHARED u64 short_64(const u8 *in, u64 n) {
    if (n == 0) return avalanche64(secret64(56) ^ secret64(64));
    if (n <= 3) {
        const u32 combined = (u32)in[0] << 16 | (u32)in[n >> 1] << 24 | in[n - 1] | (u32)n << 8;
        return avalanche64(combined ^ (u64)(secret32(0) ^ secret32(4)));
    }
    if (n <= 8) {
        u64 h = (load32(in + n - 4) + ((u64)load32(in) << 32)) ^ (secret64(8) ^ secret64(16));
        h ^= rotate64(h, 49) ^ rotate64(h, 24);
        h *= MX2;
        h ^= (h >> 35) + n;
        h *= MX2;
        return h ^ h >> 28;
    }
    if (n <= 16) {
        const u64 low = load64(in) ^ (secret64(24) ^ secret64(32));
        const u64 high = load64(in + n - 8) ^ (secret64(40) ^ secret64(48));
        return avalanche(n + swap64(low) + high + fold64(low, high));
    }
    u64 acc = n * P64_1;
    if (n <= 128) {
        for (int i = (int)(n - 1) / 32; i >= 0; i--)
            acc += mix16(in + 16 * i, 32 * i, 0) + mix16(in + n - 16 * (i + 1), 32 * i + 16, 0);
        return avalanche(acc);
    }
    for (int i = 0; i < 8; i++) acc += mix16(in + 16 * i, 16 * i, 0);
    acc = avalanche(acc);
    for (int i = 8; i < (int)n / 16; i++) acc += mix16(in + 16 * i, 16 * (i - 8) + 3, 0);
    return avalanche(acc + mix16(in + n - 16, 136 - 17, 0));
}
