// Encode blocks of bytes as zstd frames (RFC 8878) of one block: Huffman-coded literals in four streams, no sequences.
// Any zstd decoder reads them. A block that does not shrink becomes a raw block; a block of one value becomes RLE.
//
// One thread block per frame: grid (n), block (THREADS). Destinations are multiples of 4, with room for length + 16
// bytes. Lengths are 1 to 65,791: a content size of one or two bytes can hold them.

#define THREADS 256
#define STREAMS 4
#define PER_STREAM (THREADS / STREAMS)
#define MIN_LENGTH 64     // shorter blocks stay raw

struct Tree {
    u32 sorted[256];      // counts, ascending; then lengths of codes, descending
    u8 symbols[256];      // of the sorted counts
    u8 bits[256];         // length of every symbol's code, 0: none
    u8 weights[256];
    u32 codes[256];       // code | length << 16
    u32 of_length[MAX_BITS + 1];   // the number of codes of each length
    u32 first_code[MAX_BITS + 1];  // the first code of each length
    u8 description[DESCRIPTION_BYTES];
    u32 description_bytes, max_bits, present, last;  // present: distinct symbols; last: the highest symbol
    FseEncoder fse;
};

// Replace `n` ascending counts by the lengths of their codes, in place; set the first codes.
__device__ void code_lengths(Tree& tree, int n) {
    for (int i = 0; i <= MAX_BITS; i++) tree.of_length[i] = 0;
    count_depths(tree.sorted, n, MAX_BITS, tree.of_length);
    fit_lengths(tree.of_length, MAX_BITS);
    first_codes(tree.of_length, tree.first_code);
    int at = 0;
    tree.max_bits = 0;
    for (int bits = MAX_BITS; bits > 0; bits--) {
        if (tree.of_length[bits] && !tree.max_bits) tree.max_bits = bits;
        for (u32 i = 0; i < tree.of_length[bits]; i++) tree.sorted[at++] = bits;
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
        tree.weights[t] = own ? tree.max_bits + 1 - tree.bits[t] : 0;
        if (own) {
            u32 code = tree.first_code[tree.bits[t]];
            for (u32 s = 0; s < t; s++) code += tree.bits[s] == tree.bits[t];
            tree.codes[t] = code | (u32)tree.bits[t] << 16;
        }
        __syncthreads();
        if (t == 0) tree.description_bytes = describe(&tree.fse, tree.weights, tree.last, tree.description);
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
