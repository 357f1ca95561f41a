// Decode zstd frames of one block (RFC 8878) without sequences: Huffman-coded literals in one or four streams, raw, or
// RLE. huffman_encode.cu writes no other frames; for skewed noise, zstd's encoder writes hardly any others.
//
// One thread block per frame: grid (n), block (THREADS). For any bytes of a frame, it reads nothing beyond the frame
// and writes nothing beyond its output. Any other frame leaves its output unchanged or half written: the caller
// compares digests.

#define THREADS 32
#define STREAMS 4

struct Table {
    unsigned short entries[1 << MAX_BITS];  // by the next max_bits bits: symbol | length of its code << 8
    u8 weights[256];
    unsigned short starts[256];  // the first entry of each symbol
    u32 max_bits, streams, streams_at, literals_end, from, kind;
    FseDecoder fse;
};

// Return the kind of a frame; for Huffman-coded literals, set weights and streams in `table`. One thread calls it.
__device__ u32 parse(Table& table, const u8* p, u32 size, u32 n) {
    Literals found;
    const u32 kind = kind_of(p, size, n, found);
    table.from = found.at;
    if (kind != HUFFMAN) return kind;
    const u32 end = found.end, jumps = found.streams > 1 ? 6 : 0;  // bytes of the sizes of all streams but the last
    u32 symbols;
    table.streams = found.streams;
    const u32 bytes = read_weights(&table.fse, p + found.at, end - found.at, table.weights, &symbols, &table.max_bits);
    if (!bytes || found.at + bytes + jumps + table.streams > end) return BAD;
    for (u32 i = symbols; i < 256; i++) table.weights[i] = 0;
    u32 next[MAX_BITS + 2], start = 0;
    for (u32 w = 1; w <= table.max_bits; w++) {
        next[w] = start;
        for (u32 i = 0; i < symbols; i++) start += table.weights[i] == w ? 1u << w >> 1 : 0;
    }
    for (u32 i = 0; i < symbols; i++) {
        const u32 w = table.weights[i];
        if (w) {
            table.starts[i] = next[w];
            next[w] += 1u << w >> 1;
        }
    }
    table.streams_at = found.at + bytes + jumps;
    table.literals_end = end;
    return HUFFMAN;
}

// Reads the bits of a stream from its end.
struct BitReader {
    const u8* bytes;
    u32 left;   // unread bytes
    u32 ahead;  // the last aligned word of the unread bytes, loaded early
    u64 held;   // bits that were read and not used, from the highest bit down; the other bits are 0
    int have;   // the number of bits in `held`; negative if more were used than the stream has

    __device__ __forceinline__ BitReader(const u8* p, u32 count) : bytes(p), left(count - 1), ahead(0) {
        have = (int)high_bit(p[left]);  // below the bit that marks the end
        held = have ? (u64)p[left] << (64 - have) : 0;
        while (left && (u64)(bytes + left) & 3) by_bytes(1);
        look_ahead();
    }
    __device__ __forceinline__ void look_ahead() {
        if (left >= 4) ahead = *(const u32*)(bytes + left - 4);
    }
    __device__ __forceinline__ void by_bytes(u32 count) {
        for (; count && left; count--, have += 8) held |= (u64)bytes[--left] << (56 - have);
    }
    // Load enough bits for two codes, if bytes are left.
    __device__ __forceinline__ void refill() {
        if (have >= 2 * MAX_BITS) return;
        if (left >= 4) {
            held |= (u64)ahead << (32 - have);
            have += 32;
            left -= 4;
            look_ahead();
        } else if (have >= 0) {
            by_bytes(4);
        }
    }
    // The same without a branch, if at least 8 bytes are left: the streams of a warp need bits at different times.
    __device__ __forceinline__ void refill_far_from_end() {
        const bool need = have < 2 * MAX_BITS;
        held |= need ? (u64)ahead << (32 - have) : 0;
        have += need ? 32 : 0;
        left -= need ? 4 : 0;
        ahead = need ? *(const u32*)(bytes + left - 4) : ahead;
    }
    __device__ __forceinline__ u32 symbol(const unsigned short* entries, u32 shift) {
        const u32 entry = entries[(u32)(held >> 32) >> shift], bits = entry >> 8;
        held <<= bits;
        have -= bits;
        return entry & 255;
    }
};

// Decode one stream, the `bytes` bytes at p, to (n,) out.
__device__ __forceinline__ void decode_stream(const Table& table, const u8* p, u32 bytes, u8* out, u32 n) {
    if (!p[bytes - 1]) return;
    const u32 shift = 32 - table.max_bits;
    BitReader reader(p, bytes);
    u32 i = 0;
    for (; i < n && (u64)(out + i) & 3; i++) {
        reader.refill();
        out[i] = (u8)reader.symbol(table.entries, shift);
    }
    for (; i + 4 <= n && reader.left >= 12; i += 4) {
        reader.refill_far_from_end();
        u32 word = reader.symbol(table.entries, shift);
        word |= reader.symbol(table.entries, shift) << 8;
        reader.refill_far_from_end();
        word |= reader.symbol(table.entries, shift) << 16;
        word |= reader.symbol(table.entries, shift) << 24;
        *(u32*)(out + i) = word;
    }
    for (; i + 4 <= n && reader.have >= 0; i += 4) {
        reader.refill();
        u32 word = reader.symbol(table.entries, shift);
        word |= reader.symbol(table.entries, shift) << 8;
        reader.refill();
        word |= reader.symbol(table.entries, shift) << 16;
        word |= reader.symbol(table.entries, shift) << 24;
        *(u32*)(out + i) = word;
    }
    for (; i < n && reader.have >= 0; i++) {
        reader.refill();
        out[i] = (u8)reader.symbol(table.entries, shift);
    }
}

// sizes: bytes of the frames; lengths: plain bytes of each.
extern "C" __global__ void huffman_decode(const u64* sources, const u64* sizes, const u64* destinations,
                                          const u64* lengths) {
    __shared__ Table table;
    const u8* source = (const u8*)sources[blockIdx.x];
    u8* out = (u8*)destinations[blockIdx.x];
    const u32 n = (u32)lengths[blockIdx.x], t = threadIdx.x;
    if (t == 0) table.kind = parse(table, source, (u32)sizes[blockIdx.x], n);
    __syncthreads();
    const u32 kind = table.kind;
    if (kind == RAW || kind == RLE)
        for (u32 i = t; i < n; i += THREADS) out[i] = source[table.from + (kind == RAW ? i : 0)];
    if (kind != HUFFMAN) return;
    for (u32 s = 0; s < 256; s++) {
        const u32 weight = table.weights[s];
        if (!weight) continue;
        const unsigned short entry = s | (table.max_bits + 1 - weight) << 8;
        for (u32 i = t; i < 1u << weight >> 1; i += THREADS) table.entries[table.starts[s] + i] = entry;
    }
    __syncthreads();
    const u32 streams = table.streams;
    if (t >= streams) return;
    const u32 share = (n + streams - 1) / streams;
    u32 from = table.streams_at, bytes = 0;
    for (u32 i = 0; i <= t; i++) {
        from += bytes;
        bytes = i < streams - 1 ? (u32)get_le(source + table.streams_at - 6 + 2 * i, 2) : table.literals_end - from;
        if (!bytes || from + bytes > table.literals_end || from >= table.literals_end) return;
    }
    const u32 first = t * share, last = first + share < n ? first + share : n;
    if (first < last) decode_stream(table, source + from, bytes, out + first, last - first);
}
