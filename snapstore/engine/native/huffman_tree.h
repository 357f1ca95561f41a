// Huffman trees of zstd frames (RFC 8878, 4.2.1): for the extension in C, and for the CUDA kernels huffman_encode and
// huffman_decode. Lengths of codes, canonical codes, and the description of a tree, which holds a weight for each
// symbol: 0 for none, else the length of the longest code + 1 - the length of its code. The weights are stored as
// nibbles (4.2.1.1), or FSE-coded in two interleaved streams (4.2.1.2; FSE: 4.1).

#define MAX_BITS 11           // of a code of a literal
#define DESCRIPTION_BYTES 160 // a longer one is cut; its length and at most 128 bytes of weights are used
#define WEIGHTS (MAX_BITS + 1)  // zstd refuses a description that gives shares to other weights
#define MAX_LOG 6             // accuracy of the FSE table of weights
#define STATES (1 << MAX_LOG)
#define MOST_WEIGHTS 255      // that a description holds; the last symbol's weight follows from the others

// -- codes

// Replace `n` ascending counts by the depths of their leaves, and count the leaves of each depth, up to
// `most` (Moffat and Katajainen 1995, "In-place calculation of minimum-redundancy codes").
SHARED void count_depths(u32 *a, int n, u32 most, u32 *of_length) {
    a[0] += a[1];
    int root = 0, leaf = 2;
    for (int next = 1; next < n - 1; next++) {
        u32 sum = 0;
        for (int child = 0; child < 2; child++) {
            if (leaf >= n || (root < next && a[root] < a[leaf])) {
                sum += a[root];
                a[root++] = (u32)next;
            } else {
                sum += a[leaf++];
            }
        }
        a[next] = sum;
    }
    a[n - 2] = 0;
    for (int next = n - 3; next >= 0; next--) a[next] = a[a[next]] + 1;
    int free = 1, inner = n - 2;
    for (u32 depth = 0; free > 0; depth++) {
        int used = 0;
        for (; inner >= 0 && a[inner] == depth; inner--) used++;
        of_length[depth < most ? depth : most] += (u32)(free - used);
        free = 2 * used;
    }
}

// Lengthen the longest of the codes that are not cut to `most` bits, until all codes fit.
SHARED void fit_lengths(u32 *of_length, u32 most) {
    u32 spent = 0;  // code space, of 2 ** most
    for (u32 bits = 1; bits <= most; bits++) spent += of_length[bits] << (most - bits);
    for (; spent > 1u << most; spent--) {
        u32 bits = most - 1;
        while (!of_length[bits]) bits--;
        of_length[bits]--;
        of_length[bits + 1] += 2;
        of_length[most]--;
    }
}

// Set the first code of each length: codes of equal length follow each other, the longest come first (4.2.1.3).
SHARED void first_codes(const u32 *of_length, u32 *first) {
    u32 code = 0;
    for (u32 bits = MAX_BITS; bits > 0; bits--) {
        first[bits] = code;
        code = (code + of_length[bits]) >> 1;
    }
}

// -- the description of a tree: writing

// Writes bits to bytes, the lowest bit first.
typedef struct {
    u8 *out;
    u32 count, fill;
    u64 held;
} WeightWriter;

SHARED void put_weight_bits(WeightWriter *writer, u32 value, u32 bits) {
    writer->held |= (u64)value << writer->fill;
    for (writer->fill += bits; writer->fill >= 8; writer->fill -= 8, writer->held >>= 8)
        if (writer->count < DESCRIPTION_BYTES - 1) writer->out[writer->count++] = (u8)writer->held;
}

SHARED void flush_weight_bits(WeightWriter *writer) {
    if (writer->fill) put_weight_bits(writer, 0, 8 - writer->fill);
}

typedef struct {
    int shares[WEIGHTS];  // how many of the states each weight has
    int next[WEIGHTS], bits_delta[WEIGHTS], state_delta[WEIGHTS];
    u8 spread[STATES];
    u16 states[STATES];
} FseEncoder;

// Set the share of each weight, at least 1 for a weight that occurs. Return how many weights occur; 0 if
// their shares do not fit.
SHARED int set_shares(FseEncoder *fse, const u8 *weights, int n, int log) {
    int left = 1 << log, most = 0, kinds = 0, *counts = fse->next;
    for (int w = 0; w < WEIGHTS; w++) counts[w] = 0;
    for (int i = 0; i < n; i++) counts[weights[i]]++;
    for (int w = 0; w < WEIGHTS; w++) {
        int share = ((counts[w] << log) + n / 2) / n;
        if (counts[w]) kinds++;
        if (counts[w] && !share) share = 1;
        fse->shares[w] = share;
        left -= share;
        if (share > fse->shares[most]) most = w;
    }
    fse->shares[most] += left;  // a few, from rounding and from shares raised to 1
    return fse->shares[most] > 0 ? kinds : 0;
}

// Write the shares as in RFC 8878, 4.1.1.
SHARED void put_shares(WeightWriter *writer, const FseEncoder *fse, int log) {
    const int size = 1 << log;
    int remaining = size + 1, threshold = size, width = log + 1;
    bool after_zero = false;
    put_weight_bits(writer, (u32)(log - 5), 4);
    for (int w = 0; w < WEIGHTS && remaining > 1;) {
        if (after_zero) {
            int start = w;
            while (w < WEIGHTS - 1 && !fse->shares[w]) w++;
            for (; w >= start + 3; start += 3) put_weight_bits(writer, 3, 2);
            put_weight_bits(writer, (u32)(w - start), 2);
        }
        int value = fse->shares[w++];
        const int most = 2 * threshold - 1 - remaining;
        remaining -= value;
        after_zero = value == 0;
        value++;
        if (value >= threshold) value += most;
        put_weight_bits(writer, (u32)value, (u32)(value < most ? width - 1 : width));
        for (; remaining < threshold; threshold >>= 1) width--;
    }
    flush_weight_bits(writer);
}

// Spread the states over the weights, and prepare the steps from state to state.
SHARED void spread_states(FseEncoder *fse, int log) {
    const int size = 1 << log;
    int first = 0, position = 0;
    for (int w = 0; w < WEIGHTS; w++) {
        const int share = fse->shares[w];
        const int bits = share > 1 ? log - (int)high_bit((u32)share - 1) : log;
        fse->bits_delta[w] = bits * 65536 - (share << bits);
        fse->state_delta[w] = first - share;
        fse->next[w] = first;
        first += share;
        for (int i = 0; i < share; i++) {
            fse->spread[position] = (u8)w;
            position = (position + (size >> 1) + (size >> 3) + 3) & (size - 1);
        }
    }
    for (int i = 0; i < size; i++) fse->states[fse->next[fse->spread[i]]++] = (u16)(size + i);
}

// Write `n` weights in two streams, from the last to the first. Return the bytes; 0: this form does not fit.
SHARED u32 put_fse_weights(FseEncoder *fse, const u8 *weights, int n, u8 *out) {
    const int log = n >= 64 ? MAX_LOG : 5, size = 1 << log;
    if (n <= 2 || set_shares(fse, weights, n, log) <= 1) return 0;
    WeightWriter writer = {out, 0, 0, 0};
    put_shares(&writer, fse, log);
    spread_states(fse, log);
    u32 state[2] = {0, 0};
    for (int i = n - 1; i >= 0; i--) {
        const u32 w = weights[i];
        u32 *s = &state[i & 1];
        if (i >= n - 2) {  // the first state of each stream: the one that costs the fewest bits
            const int bits = (fse->bits_delta[w] + (1 << 15)) >> 16;
            *s = fse->states[((bits * 65536 - fse->bits_delta[w]) >> bits) + fse->state_delta[w]];
        } else {
            const u32 bits = (*s + (u32)fse->bits_delta[w]) >> 16;
            put_weight_bits(&writer, *s & ((1u << bits) - 1), bits);
            *s = fse->states[(int)(*s >> bits) + fse->state_delta[w]];
        }
    }
    put_weight_bits(&writer, state[1] & (u32)(size - 1), (u32)log);
    put_weight_bits(&writer, state[0] & (u32)(size - 1), (u32)log);
    put_weight_bits(&writer, 1, 1);
    flush_weight_bits(&writer);
    return writer.count < 128 ? writer.count : 0;
}

// Describe the weights of all symbols before the last, `n` of them, in the shorter form that fits. Return the bytes;
// 0: neither fits.
SHARED u32 describe(FseEncoder *fse, const u8 *weights, int n, u8 *out) {
    const u32 coded = put_fse_weights(fse, weights, n, out + 1), nibbles = (u32)(n + 1) / 2;
    out[0] = (u8)coded;
    if (n > 128 || (coded && coded <= nibbles)) return coded ? 1 + coded : 0;
    out[0] = (u8)(127 + n);
    for (int i = 0; i < n; i += 2) out[1 + i / 2] = (u8)(weights[i] << 4 | (i + 1 < n ? weights[i + 1] : 0));
    return 1 + nibbles;
}

// -- the description of a tree: reading

// Return `count` bits, at most 24, from position `bit` on, the lowest first; bits beyond the end are 0.
SHARED u32 peek_bits(const u8 *p, u32 bytes, u32 bit, int count) {
    u32 value = 0;
    for (u32 i = bit / 8, k = 0; k < 4; i++, k++)
        if (i < bytes) value |= (u32)p[i] << (8 * k);
    return value >> (bit % 8) & ((1u << count) - 1);
}

// Move `at` down by `count` bits and return these bits; bits below position 0 are 0.
SHARED u32 read_back(const u8 *p, u32 bytes, int *at, int count) {
    *at -= count;
    if (*at >= 0) return peek_bits(p, bytes, (u32)*at, count);
    return *at + count > 0 ? peek_bits(p, bytes, 0, (int)(*at + count)) << -*at : 0;
}

typedef struct {
    int log, shares[WEIGHTS];
    u32 next[WEIGHTS];
    u8 symbols[STATES], bits[STATES], bases[STATES];
} FseDecoder;

// Read the shares (RFC 8878, 4.1.1). Return the bytes of their description; 0: it is not valid.
SHARED u32 get_shares(FseDecoder *fse, const u8 *p, u32 bytes) {
    for (int i = 0; i < WEIGHTS; i++) fse->shares[i] = 0;
    fse->log = (int)peek_bits(p, bytes, 0, 4) + 5;
    if (fse->log > MAX_LOG) return 0;
    int remaining = (1 << fse->log) + 1, threshold = 1 << fse->log, width = fse->log + 1, w = 0;
    u32 bit = 4;
    bool after_zero = false;
    while (remaining > 1) {
        for (u32 more = after_zero ? 3 : 0; more == 3 && w < WEIGHTS; w += (int)more, bit += 2)
            more = peek_bits(p, bytes, bit, 2);
        if (w >= WEIGHTS || bit > 8 * bytes) return 0;
        const int most = 2 * threshold - 1 - remaining;
        int value = (int)peek_bits(p, bytes, bit, width - 1);
        if (value < most) {
            bit += (u32)width - 1;
        } else {
            value = (int)peek_bits(p, bytes, bit, width);
            if (value >= threshold) value -= most;
            bit += (u32)width;
        }
        value--;  // -1: a share of less than one state, which gets one
        remaining -= value < 0 ? 1 : value;
        after_zero = value == 0;
        fse->shares[w++] = value;
        for (; threshold > 1 && remaining < threshold; threshold >>= 1) width--;
    }
    return remaining == 1 && bit <= 8 * bytes ? (bit + 7) / 8 : 0;
}

SHARED void make_states(FseDecoder *fse) {
    const int size = 1 << fse->log;
    int high = size - 1, position = 0;
    for (int w = 0; w < WEIGHTS; w++) {
        fse->next[w] = fse->shares[w] < 0 ? 1 : (u32)fse->shares[w];
        if (fse->shares[w] < 0) fse->symbols[high--] = (u8)w;
    }
    for (int w = 0; w < WEIGHTS; w++)
        for (int i = 0; i < fse->shares[w]; i++) {
            fse->symbols[position] = (u8)w;
            do position = (position + (size >> 1) + (size >> 3) + 3) & (size - 1);
            while (position > high);
        }
    for (int i = 0; i < size; i++) {
        const u32 state = fse->next[fse->symbols[i]]++;
        fse->bits[i] = (u8)(fse->log - (int)high_bit(state));
        fse->bases[i] = (u8)((int)(state << fse->bits[i]) - size);
    }
}

// Read weights in two streams. Return their number; 0: they are not valid.
SHARED u32 get_fse_weights(FseDecoder *fse, const u8 *p, u32 bytes, u8 *weights) {
    const u32 head = get_shares(fse, p, bytes);
    if (!head || head >= bytes || !p[bytes - 1]) return 0;
    make_states(fse);
    p += head;
    bytes -= head;
    int at = 8 * ((int)bytes - 1) + (int)high_bit(p[bytes - 1]);
    u32 state[2];
    for (int i = 0; i < 2; i++) state[i] = read_back(p, bytes, &at, fse->log);
    if (at < 0) return 0;
    for (u32 n = 0; n + 1 < MOST_WEIGHTS; n++) {
        const u32 s = state[n & 1];
        weights[n] = fse->symbols[s];
        state[n & 1] = fse->bases[s] + read_back(p, bytes, &at, fse->bits[s]);
        if (at < 0) {
            weights[n + 1] = fse->symbols[state[~n & 1]];
            return n + 2;
        }
    }
    return 0;
}

// Set the weight of the last symbol so that the codes fill the code space. Return the length of the longest code; 0:
// the weights are not valid.
SHARED u32 complete_weights(u8 *weights, u32 count) {
    u32 sum = 0, ones = 0;
    for (u32 i = 0; i < count; i++) {
        if (weights[i] > MAX_BITS) return 0;
        sum += 1u << weights[i] >> 1;
        ones += weights[i] == 1;
    }
    if (!sum || sum >= 1u << MAX_BITS) return 0;
    const u32 longest = high_bit(sum) + 1, rest = (1u << longest) - sum;
    if (rest & (rest - 1)) return 0;
    weights[count] = (u8)(high_bit(rest) + 1);
    ones += weights[count] == 1;
    return ones >= 2 && ones % 2 == 0 ? longest : 0;  // the longest codes come in pairs
}

// Read a description of at most `bytes` bytes: the weights of the first `symbols` symbols, and the length of the
// `longest` code. Return its length; 0: it is not valid. `weights`: room for 256.
SHARED u32 read_weights(FseDecoder *fse, const u8 *data, u32 bytes, u8 *weights, u32 *symbols, u32 *longest) {
    if (!bytes) return 0;
    const u32 head = data[0];
    u32 count = head - 127;
    const u32 length = head < 128 ? head : (count + 1) / 2;
    if (!length || 1 + length > bytes) return 0;
    if (head < 128)
        count = get_fse_weights(fse, data + 1, length, weights);
    else
        for (u32 i = 0; i < count; i++) weights[i] = i % 2 ? data[1 + i / 2] & 15 : data[1 + i / 2] >> 4;
    *longest = count ? complete_weights(weights, count) : 0;
    *symbols = count + 1;
    return *longest ? 1 + length : 0;
}
