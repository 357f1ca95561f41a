// Huffman trees of zstd frames (RFC 8878, 4.2.1): codes, and the description of a tree, which holds a weight
// for each symbol: 0 for none, else the length of the longest code + 1 - the length of its code. The weights
// are stored as nibbles (4.2.1.1), or FSE-coded in two interleaved streams (4.2.1.2; FSE: 4.1).
#include "native.h"

#define WEIGHTS (MAX_BITS + 1)  // zstd refuses a description that gives shares to other weights
#define MAX_LOG 6        // accuracy of the FSE table of weights
#define STATES (1 << MAX_LOG)
#define MOST_WEIGHTS 255 // that a description holds; the last symbol's weight follows from the others

// Number the codes: those of equal length in the order of their symbols, the longest first (4.2.1.3).
static void assign_codes(Tree *tree) {
    u32 of_length[MAX_BITS + 1] = {0}, next[MAX_BITS + 1], code = 0;
    for (int s = 0; s < 256; s++) of_length[tree->lengths[s]]++;
    for (u32 bits = MAX_BITS; bits > 0; bits--) {
        next[bits] = code;
        code = (code + of_length[bits]) >> 1;
    }
    for (int s = 0; s < 256; s++) {
        const u32 bits = tree->lengths[s];
        tree->codes[s] = bits ? next[bits]++ | bits << 16 : 0;
    }
}

// -- the description of a tree: writing

// Writes bits to bytes, the lowest bit first.
typedef struct {
    u8 *out;
    u32 count, fill;
    u64 held;
} BitWriter;

static void put_bits(BitWriter *writer, u32 value, u32 bits) {
    writer->held |= (u64)value << writer->fill;
    for (writer->fill += bits; writer->fill >= 8; writer->fill -= 8, writer->held >>= 8)
        if (writer->count < DESCRIPTION_BYTES - 1) writer->out[writer->count++] = (u8)writer->held;
}

static void flush_bits(BitWriter *writer) {
    if (writer->fill) put_bits(writer, 0, 8 - writer->fill);
}

typedef struct {
    int shares[WEIGHTS];  // how many of the states each weight has
    int bits_delta[WEIGHTS], state_delta[WEIGHTS];
    u16 states[STATES];
} FseEncoder;

// Set the share of each weight, at least 1 for a weight that occurs. Return how many weights occur; 0 if
// their shares do not fit.
static int set_shares(FseEncoder *fse, const u8 *weights, int n, int log) {
    int left = 1 << log, most = 0, kinds = 0, counts[WEIGHTS] = {0};
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
static void put_shares(BitWriter *writer, const FseEncoder *fse, int log) {
    const int size = 1 << log;
    int remaining = size + 1, threshold = size, width = log + 1;
    bool after_zero = false;
    put_bits(writer, (u32)(log - 5), 4);
    for (int w = 0; w < WEIGHTS && remaining > 1;) {
        if (after_zero) {
            int start = w;
            while (w < WEIGHTS - 1 && !fse->shares[w]) w++;
            for (; w >= start + 3; start += 3) put_bits(writer, 3, 2);
            put_bits(writer, (u32)(w - start), 2);
        }
        int value = fse->shares[w++];
        const int most = 2 * threshold - 1 - remaining;
        remaining -= value;
        after_zero = value == 0;
        value++;
        if (value >= threshold) value += most;
        put_bits(writer, (u32)value, (u32)(value < most ? width - 1 : width));
        for (; remaining < threshold; threshold >>= 1) width--;
    }
    flush_bits(writer);
}

// Spread the states over the weights, and prepare the steps from state to state.
static void spread_states(FseEncoder *fse, int log) {
    const int size = 1 << log;
    int next[WEIGHTS], first = 0, position = 0;
    u8 spread[STATES];
    for (int w = 0; w < WEIGHTS; w++) {
        const int share = fse->shares[w];
        const int bits = share > 1 ? log - (int)high_bit((u32)share - 1) : log;
        fse->bits_delta[w] = bits * 65536 - (share << bits);
        fse->state_delta[w] = first - share;
        next[w] = first;
        first += share;
        for (int i = 0; i < share; i++) {
            spread[position] = (u8)w;
            position = (position + (size >> 1) + (size >> 3) + 3) & (size - 1);
        }
    }
    for (int i = 0; i < size; i++) fse->states[next[spread[i]]++] = (u16)(size + i);
}

// Write `n` weights in two streams, from the last to the first. Return the bytes; 0: this form does not fit.
static u32 put_fse_weights(const u8 *weights, int n, u8 *out) {
    FseEncoder fse;
    const int log = n >= 64 ? MAX_LOG : 5, size = 1 << log;
    if (n <= 2 || set_shares(&fse, weights, n, log) <= 1) return 0;
    BitWriter writer = {out, 0, 0, 0};
    put_shares(&writer, &fse, log);
    spread_states(&fse, log);
    u32 state[2] = {0, 0};
    for (int i = n - 1; i >= 0; i--) {
        const u32 w = weights[i];
        u32 *s = &state[i & 1];
        if (i >= n - 2) {  // the first state of each stream: the one that costs the fewest bits
            const int bits = (fse.bits_delta[w] + (1 << 15)) >> 16;
            *s = fse.states[((bits * 65536 - fse.bits_delta[w]) >> bits) + fse.state_delta[w]];
        } else {
            const u32 bits = (*s + (u32)fse.bits_delta[w]) >> 16;
            put_bits(&writer, *s & ((1u << bits) - 1), bits);
            *s = fse.states[(int)(*s >> bits) + fse.state_delta[w]];
        }
    }
    put_bits(&writer, state[1] & (u32)(size - 1), (u32)log);
    put_bits(&writer, state[0] & (u32)(size - 1), (u32)log);
    put_bits(&writer, 1, 1);
    flush_bits(&writer);
    return writer.count < 128 ? writer.count : 0;
}

// Describe the weights of all symbols before the last, in the shorter form that fits.
static void describe(Tree *tree) {
    u8 weights[256];
    int last = 255;
    while (!tree->lengths[last]) last--;
    for (int s = 0; s < last; s++)
        weights[s] = (u8)(tree->lengths[s] ? tree->max_bits + 1 - tree->lengths[s] : 0);
    u8 *out = tree->description;
    const u32 coded = put_fse_weights(weights, last, out + 1), nibbles = (u32)(last + 1) / 2;
    tree->description_bytes = coded ? 1 + coded : 0;
    out[0] = (u8)coded;
    if (last > 128 || (coded && coded <= nibbles)) return;
    weights[last] = 0;
    out[0] = (u8)(127 + last);
    for (int i = 0; i < last; i += 2) out[1 + i / 2] = (u8)(weights[i] << 4 | weights[i + 1]);
    tree->description_bytes = 1 + nibbles;
}

void make_tree(const u32 counts[256], Tree *tree) {
    tree->max_bits = code_lengths(counts, 256, MAX_BITS, tree->lengths);
    assign_codes(tree);
    describe(tree);
}

// -- the description of a tree: reading

// Return `count` bits, at most 24, from position `bit` on, the lowest first; bits beyond the end are 0.
static u32 peek_bits(const u8 *p, size_t bytes, size_t bit, int count) {
    u32 value = 0;
    for (size_t i = bit / 8, k = 0; k < 4 && i < bytes; i++, k++) value |= (u32)p[i] << (8 * k);
    return value >> (bit % 8) & ((1u << count) - 1);
}

// Move `at` down by `count` bits and return these bits; bits below position 0 are 0.
static u32 read_back(const u8 *p, size_t bytes, i64 *at, int count) {
    *at -= count;
    if (*at >= 0) return peek_bits(p, bytes, (size_t)*at, count);
    return *at + count > 0 ? peek_bits(p, bytes, 0, (int)(*at + count)) << -*at : 0;
}

typedef struct {
    int log, shares[WEIGHTS];
    u8 symbols[STATES], bits[STATES], bases[STATES];
} FseDecoder;

// Read the shares (RFC 8878, 4.1.1). Return the bytes of their description; 0: it is not valid.
static size_t get_shares(FseDecoder *fse, const u8 *p, size_t bytes) {
    memset(fse->shares, 0, sizeof fse->shares);
    fse->log = (int)peek_bits(p, bytes, 0, 4) + 5;
    if (fse->log > MAX_LOG) return 0;
    int remaining = (1 << fse->log) + 1, threshold = 1 << fse->log, width = fse->log + 1, w = 0;
    size_t bit = 4;
    bool after_zero = false;
    while (remaining > 1) {
        for (u32 more = after_zero ? 3 : 0; more == 3 && w < WEIGHTS; w += (int)more, bit += 2)
            more = peek_bits(p, bytes, bit, 2);
        if (w >= WEIGHTS || bit > 8 * bytes) return 0;
        const int most = 2 * threshold - 1 - remaining;
        int value = (int)peek_bits(p, bytes, bit, width - 1);
        if (value < most) {
            bit += (size_t)width - 1;
        } else {
            value = (int)peek_bits(p, bytes, bit, width);
            if (value >= threshold) value -= most;
            bit += (size_t)width;
        }
        value--;  // -1: a share of less than one state, which gets one
        remaining -= value < 0 ? 1 : value;
        after_zero = value == 0;
        fse->shares[w++] = value;
        for (; threshold > 1 && remaining < threshold; threshold >>= 1) width--;
    }
    return remaining == 1 && bit <= 8 * bytes ? (bit + 7) / 8 : 0;
}

static void make_states(FseDecoder *fse) {
    const int size = 1 << fse->log;
    int high = size - 1, position = 0;
    u32 next[WEIGHTS];
    for (int w = 0; w < WEIGHTS; w++) {
        next[w] = fse->shares[w] < 0 ? 1 : (u32)fse->shares[w];
        if (fse->shares[w] < 0) fse->symbols[high--] = (u8)w;
    }
    for (int w = 0; w < WEIGHTS; w++)
        for (int i = 0; i < fse->shares[w]; i++) {
            fse->symbols[position] = (u8)w;
            do position = (position + (size >> 1) + (size >> 3) + 3) & (size - 1);
            while (position > high);
        }
    for (int i = 0; i < size; i++) {
        const u32 state = next[fse->symbols[i]]++;
        fse->bits[i] = (u8)(fse->log - (int)high_bit(state));
        fse->bases[i] = (u8)((int)(state << fse->bits[i]) - size);
    }
}

// Read weights in two streams. Return their number; 0: they are not valid.
static u32 get_fse_weights(const u8 *p, size_t bytes, u8 *weights) {
    FseDecoder fse;
    const size_t head = get_shares(&fse, p, bytes);
    if (!head || head >= bytes || !p[bytes - 1]) return 0;
    make_states(&fse);
    p += head;
    bytes -= head;
    i64 at = 8 * ((i64)bytes - 1) + (i64)high_bit(p[bytes - 1]);
    u32 state[2];
    for (int i = 0; i < 2; i++) state[i] = read_back(p, bytes, &at, fse.log);
    if (at < 0) return 0;
    for (u32 n = 0; n + 1 < MOST_WEIGHTS; n++) {
        const u32 s = state[n & 1];
        weights[n] = fse.symbols[s];
        state[n & 1] = fse.bases[s] + read_back(p, bytes, &at, fse.bits[s]);
        if (at < 0) {
            weights[n + 1] = fse.symbols[state[~n & 1]];
            return n + 2;
        }
    }
    return 0;
}

// Set the weight of the last symbol so that the codes fill the code space. Return whether the weights are
// valid.
static bool complete_weights(u8 weights[256], u32 count) {
    u32 sum = 0, ones = 0;
    for (u32 i = 0; i < count; i++) {
        if (weights[i] > MAX_BITS) return false;
        sum += 1u << weights[i] >> 1;
        ones += weights[i] == 1;
    }
    if (!sum || sum >= 1u << MAX_BITS) return false;
    const u32 rest = (2u << high_bit(sum)) - sum;
    if (rest & (rest - 1)) return false;
    weights[count] = (u8)(high_bit(rest) + 1);
    ones += weights[count] == 1;
    return ones >= 2 && ones % 2 == 0;  // the longest codes come in pairs
}

size_t read_weights(const u8 *data, size_t bytes, u8 weights[256], u32 *symbols) {
    if (!bytes) return 0;
    const u32 head = data[0];
    u32 count = head - 127;
    const size_t length = head < 128 ? head : (count + 1) / 2;
    if (!length || 1 + length > bytes) return 0;
    if (head < 128)
        count = get_fse_weights(data + 1, length, weights);
    else
        for (u32 i = 0; i < count; i++) weights[i] = i % 2 ? data[1 + i / 2] & 15 : data[1 + i / 2] >> 4;
    if (!count || !complete_weights(weights, count)) return 0;
    *symbols = count + 1;
    return 1 + length;
}
