// Encode blocks of bytes as zstd frames (RFC 8878) of one block: Huffman-coded literals in four streams, no sequences.
// Any zstd decoder reads them. A block that does not shrink becomes a raw block; a block of one value becomes RLE.
//
// One thread block per frame: grid (n), block (THREADS). Destinations are multiples of 4, with room for length + 16
// bytes. Lengths are 1 to 65,791: a content size of one or two bytes can hold them.

#define THREADS 256
#define STREAMS 4
#define PER_STREAM (THREADS / STREAMS)
#define MAX_BITS 11
#define MIN_LENGTH 64     // shorter blocks stay raw
#define WEIGHTS 12        // weights 0 to MAX_BITS
#define TREE_BYTES 160    // a longer description is cut; only up to 1 + 127 bytes are used

// Writes bits, least significant first, to bytes. One thread uses it.
struct BitWriter {
    u8* out;
    u32 count, fill;
    u64 held;
    __device__ __forceinline__ void put(u32 value, u32 bits) {
        held |= (u64)value << fill;
        for (fill += bits; fill >= 8; fill -= 8, held >>= 8)
            if (count < TREE_BYTES) out[count++] = (u8)held;
    }
    __device__ __forceinline__ void flush() {
        if (fill) put(0, 8 - fill);
    }
};

__device__ __forceinline__ u32 high_bit(u32 value) { return 31 - __clz(value); }

struct Tree {
    u32 sorted[256];      // counts, ascending; then lengths of codes, descending
    u8 symbols[256];      // of the sorted counts
    u8 bits[256];         // length of every symbol's code, 0: none
    u32 codes[256];       // code | length << 16
    u32 of_length[32];    // the number of codes of each length
    u32 first_code[MAX_BITS + 1];  // the first code of each length
    u8 description[TREE_BYTES];
    u32 description_bytes, max_bits, present, last;  // present: distinct symbols; last: the highest symbol
    int shares[WEIGHTS];  // of 64 or 32 states: how many each weight gets
    int next[WEIGHTS + 1], bits_delta[WEIGHTS], state_delta[WEIGHTS];
    u8 spread[64];
    unsigned short states[64];
};

// Compute the lengths of optimal codes for `n` ascending counts, in place (Moffat and Katajainen 1995). No length is
// above MAX_BITS: longer codes are cut to it, then the longest of the others are lengthened until all codes fit.
__device__ void code_lengths(Tree& tree, int n) {
    u32* a = tree.sorted;
    a[0] += a[1];
    int root = 0, leaf = 2;
    for (int next = 1; next < n - 1; next++) {
        u32 sum = 0;
        for (int child = 0; child < 2; child++) {
            if (leaf >= n || (root < next && a[root] < a[leaf])) {
                sum += a[root];
                a[root++] = next;
            } else {
                sum += a[leaf++];
            }
        }
        a[next] = sum;
    }
    a[n - 2] = 0;
    for (int next = n - 3; next >= 0; next--) a[next] = a[a[next]] + 1;
    for (int i = 0; i < 32; i++) tree.of_length[i] = 0;
    int free = 1, inner = n - 2;
    for (u32 depth = 0; free > 0; depth++) {
        int used = 0;
        for (; inner >= 0 && a[inner] == depth; inner--) used++;
        tree.of_length[depth < MAX_BITS ? depth : MAX_BITS] += free - used;
        free = 2 * used;
    }
    u32 spent = 0;  // code space, of 2 ** MAX_BITS
    for (int bits = 1; bits <= MAX_BITS; bits++) spent += tree.of_length[bits] << (MAX_BITS - bits);
    for (; spent > 1u << MAX_BITS; spent--) {
        int bits = MAX_BITS - 1;
        while (!tree.of_length[bits]) bits--;
        tree.of_length[bits]--;
        tree.of_length[bits + 1] += 2;
        tree.of_length[MAX_BITS]--;
    }
    int at = 0;
    tree.max_bits = 0;
    u32 code = 0;
    for (int bits = MAX_BITS; bits > 0; bits--) {
        if (tree.of_length[bits] && !tree.max_bits) tree.max_bits = bits;
        tree.first_code[bits] = code;
        code = (code + tree.of_length[bits]) >> 1;
        for (u32 i = 0; i < tree.of_length[bits]; i++) a[at++] = bits;
    }
}

__device__ __forceinline__ u32 weight_of(const Tree& tree, int symbol) {
    return tree.bits[symbol] ? tree.max_bits + 1 - tree.bits[symbol] : 0;
}

// Set the shares of the weights of symbols 0 to n - 1 in a table of 1 << log states, at least 1 for each weight that
// occurs. Return how many weights occur; 0 if their shares do not fit.
__device__ int weight_shares(Tree& tree, int n, int log) {
    int left = 1 << log, most = 0, kinds = 0;
    for (int w = 0; w < WEIGHTS; w++) tree.next[w] = 0;
    for (int i = 0; i < n; i++) tree.next[weight_of(tree, i)]++;
    for (int w = 0; w < WEIGHTS; w++) {
        int share = ((tree.next[w] << log) + n / 2) / n;
        if (tree.next[w]) {
            kinds++;
            if (!share) share = 1;
        }
        tree.shares[w] = share;
        left -= share;
        if (share > tree.shares[most]) most = w;
    }
    tree.shares[most] += left;  // at most a few, from rounding and from shares raised to 1
    return tree.shares[most] > 0 ? kinds : 0;
}

// Write the weights of the symbols before the last to `description`, in the shorter form that fits: two interleaved FSE
// streams (4.2.1.2), or nibbles (4.2.1.1). Set `description_bytes`; 0: neither fits.
__device__ void describe(Tree& tree) {
    const int n = tree.last;  // the last symbol's weight is not written: it follows from the others
    const int log = n >= 64 ? 6 : 5, size = 1 << log;
    tree.description_bytes = 0;
    if (n > 2 && weight_shares(tree, n, log) > 1) {
        BitWriter writer = {tree.description + 1, 0, 0, 0};
        writer.put(log - 5, 4);
        int remaining = size + 1, threshold = size, width = log + 1;
        bool after_zero = false;
        for (int w = 0; w < WEIGHTS && remaining > 1;) {
            if (after_zero) {
                int start = w;
                while (!tree.shares[w]) w++;
                for (; w >= start + 3; start += 3) writer.put(3, 2);
                writer.put(w - start, 2);
            }
            int value = tree.shares[w++];
            const int most = 2 * threshold - 1 - remaining;
            remaining -= value;
            after_zero = value == 0;
            value++;
            if (value >= threshold) value += most;
            writer.put(value, value < most ? width - 1 : width);
            for (; remaining < threshold; threshold >>= 1) width--;
        }
        writer.flush();

        tree.next[0] = 0;
        for (int w = 0; w < WEIGHTS; w++) tree.next[w + 1] = tree.next[w] + tree.shares[w];
        int position = 0;
        for (int w = 0; w < WEIGHTS; w++)
            for (int i = 0; i < tree.shares[w]; i++) {
                tree.spread[position] = w;
                position = (position + (size >> 1) + (size >> 3) + 3) & (size - 1);
            }
        for (int w = 0; w < WEIGHTS; w++) {
            const int share = tree.shares[w];
            const int out = share > 1 ? log - (int)high_bit(share - 1) : log;
            tree.bits_delta[w] = (out << 16) - (share << out);
            tree.state_delta[w] = tree.next[w] - share;
        }
        for (int i = 0; i < size; i++) tree.states[tree.next[tree.spread[i]]++] = size + i;

        u32 state[2] = {0, 0};
        for (int i = n - 1; i >= 0; i--) {
            const u32 w = weight_of(tree, i);
            u32& s = state[i & 1];
            if (i >= n - 2) {  // the first state of each stream: the one that costs the fewest bits
                const u32 out = (tree.bits_delta[w] + (1 << 15)) >> 16;
                s = tree.states[(((out << 16) - tree.bits_delta[w]) >> out) + tree.state_delta[w]];
            } else {
                const u32 out = (s + tree.bits_delta[w]) >> 16;
                writer.put(s & ((1u << out) - 1), out);
                s = tree.states[(s >> out) + tree.state_delta[w]];
            }
        }
        writer.put(state[1] & (size - 1), log);
        writer.put(state[0] & (size - 1), log);
        writer.put(1, 1);
        writer.flush();
        if (writer.count < 128) {
            tree.description[0] = writer.count;
            tree.description_bytes = 1 + writer.count;
        }
    }
    const u32 nibbles = 1 + (n + 1) / 2;
    if (n <= 128 && (!tree.description_bytes || nibbles < tree.description_bytes)) {
        tree.description[0] = 127 + n;
        for (int i = 0; i < n; i += 2)
            tree.description[1 + i / 2] = weight_of(tree, i) << 4 | (i + 1 < n ? weight_of(tree, i + 1) : 0);
        tree.description_bytes = nibbles;
    }
}

__device__ __forceinline__ void put_le(u8* out, u64 value, int count) {
    for (int i = 0; i < count; i++) out[i] = (u8)(value >> (8 * i));
}

// Write magic, descriptor, content size and the header of the only block; return their length.
__device__ u32 frame_header(u8* out, u32 length, u32 type, u32 block_bytes) {
    const u32 content = length < 256 ? 1 : 2;
    put_le(out, 0xFD2FB528u, 4);
    out[4] = content == 1 ? 0x20 : 0x60;
    put_le(out + 5, content == 1 ? length : length - 256, content);
    put_le(out + 5 + content, 1 | type << 1 | block_bytes << 3, 3);
    return 8 + content;
}

// sizes: of every frame, written.
extern "C" __global__ void huffman_encode(const u64* sources, const u64* destinations, const u64* lengths,
                                          u32* sizes) {
    __shared__ u32 histogram[256 * 32];  // a column per lane: no two lanes of a warp count in the same bank
    __shared__ u32 counts[256];
    __shared__ u32 bits_of[THREADS];
    __shared__ u32 stream_bytes[STREAMS];
    __shared__ Tree tree;
    const u8* source = (const u8*)sources[blockIdx.x];
    u8* out = (u8*)destinations[blockIdx.x];
    const u32 n = (u32)lengths[blockIdx.x], t = threadIdx.x, lane = t % 32;

    for (u32 i = t; i < 256 * 32; i += THREADS) histogram[i] = 0;
    __syncthreads();
    for (u32 at = 16 * t; at < n; at += 16 * THREADS) {
        const u32 count = n - at < 16 ? n - at : 16;
        const uint4 value = load_upto16(source + at, count);
        const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i < count) atomicAdd(&histogram[(words[i / 4] >> (8 * (i % 4)) & 255) * 32 + lane], 1u);
    }
    if (t == 0) tree.present = 0;
    __syncthreads();
    u32 own = 0;  // count of symbol t
    for (u32 i = 0; i < 32; i++) own += histogram[t * 32 + (i + t) % 32];
    counts[t] = own;
    tree.bits[t] = 0;
    __syncthreads();
    if (own) {
        u32 rank = 0;
        bool is_last = true;
        for (u32 s = 0; s < 256; s++) {
            const u32 other = counts[s];
            rank += other && (other < own || (other == own && s < t));
            is_last = is_last && (!other || s <= t);
        }
        tree.sorted[rank] = own;
        tree.symbols[rank] = t;
        if (is_last) tree.last = t;
        atomicAdd(&tree.present, 1u);
    }
    __syncthreads();
    const u32 present = tree.present;
    if (present == 1) {
        if (t == 0) {
            const u32 at = frame_header(out, n, 1, n);
            out[at] = (u8)tree.last;
            sizes[blockIdx.x] = at + 1;
        }
        return;
    }
    bool smaller = n >= MIN_LENGTH;
    u32 before = 0, total = 0, at = 0, streams_at = 0, begin = 0, end = 0;
    const u32 stream = t / PER_STREAM, share = (n + STREAMS - 1) / STREAMS;
    if (smaller) {
        if (t == 0) code_lengths(tree, present);
        __syncthreads();
        if (t < present) tree.bits[tree.symbols[t]] = (u8)tree.sorted[t];
        __syncthreads();
        if (own) {
            u32 code = tree.first_code[tree.bits[t]];
            for (u32 s = 0; s < t; s++) code += tree.bits[s] == tree.bits[t];
            tree.codes[t] = code | (u32)tree.bits[t] << 16;
        }
        if (t == 0) describe(tree);
        __syncthreads();
        // count the bits that each thread will write
        const u32 stream_end = (stream + 1) * share < n ? (stream + 1) * share : n;
        const u32 span = ((share + PER_STREAM - 1) / PER_STREAM + 15) / 16 * 16;
        begin = stream * share + t % PER_STREAM * span;
        begin = begin < stream_end ? begin : stream_end;
        end = begin + span < stream_end ? begin + span : stream_end;
        u32 bits = 0;
        for (u32 i = begin; i < end; i += 16) {
            const u32 count = end - i < 16 ? end - i : 16;
            const uint4 value = load_upto16(source + i, count);
            const u32 words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (int k = 0; k < 16; k++)
                if (k < count) bits += tree.bits[words[k / 4] >> (8 * (k % 4)) & 255];
        }
        bits_of[t] = bits;
        __syncthreads();
        // a stream is read from its end: so its last symbols are written first
        for (u32 i = t + 1; i < (stream + 1) * PER_STREAM; i++) before += bits_of[i];
        if (t % PER_STREAM == 0) stream_bytes[stream] = (before + bits) / 8 + 1;  // with the end mark
        __syncthreads();
        at = n < 256 ? 9 : 10;
        streams_at = at + 5 + tree.description_bytes + 6;
        total = streams_at + 1;
        for (int i = 0; i < STREAMS; i++) total += stream_bytes[i];
        smaller = tree.description_bytes && total - at < n;
    }
    if (!smaller) {
        if (t == 0) {
            at = frame_header(out, n, 0, n);
            sizes[blockIdx.x] = at + n;
        }
        for (u32 i = t; i < n; i += THREADS) out[(n < 256 ? 9 : 10) + i] = source[i];
        return;
    }

    u32* words = (u32*)out;
    for (u32 i = t; i < (total + 3) / 4; i += THREADS) words[i] = 0;
    __threadfence();
    __syncthreads();
    if (t == 0) {
        frame_header(out, n, 2, total - at);
        const u32 literals = tree.description_bytes + 6 + total - 1 - streams_at;
        put_le(out + at, 2 | 3 << 2 | (u64)n << 4 | (u64)literals << 22, 5);
        for (int i = 0; i < STREAMS - 1; i++) put_le(out + streams_at - 6 + 2 * i, stream_bytes[i], 2);
        sizes[blockIdx.x] = total;
    }
    for (u32 i = t; i < tree.description_bytes; i += THREADS) out[at + 5 + i] = tree.description[i];
    u32 bit = 8 * streams_at + before;
    for (u32 i = 0; i < stream; i++) bit += 8 * stream_bytes[i];
    u32 word = bit / 32, fill = bit % 32;
    bool shared = fill > 0;  // the word, with the thread that writes the previous bits
    u64 held = 0;
    for (u32 i = begin + (end - begin + 15) / 16 * 16; i > begin;) {
        i -= 16;
        const u32 count = end - i < 16 ? end - i : 16;
        const uint4 value = load_upto16(source + i, count);
        const u32 symbols[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int k = 15; k >= 0; k--)
            if (k < count) {
                const u32 code = tree.codes[symbols[k / 4] >> (8 * (k % 4)) & 255];
                held |= (u64)(code & 0xFFFF) << fill;
                fill += code >> 16;
                if (fill >= 32) {
                    if (shared)
                        atomicOr(&words[word], (u32)held);
                    else
                        words[word] = (u32)held;
                    shared = false;
                    word++;
                    held >>= 32;
                    fill -= 32;
                }
            }
    }
    if (t % PER_STREAM == 0) {
        held |= 1ull << fill;
        fill++;
    }
    if (fill && (u32)held) atomicOr(&words[word], (u32)held);
    if (fill > 32) atomicOr(&words[word + 1], (u32)(held >> 32));
}
