// The kinds of zstd frames (RFC 8878) that huffman_decode.cu reads: one block without sequences. It precedes the
// sources that need it.

enum { BAD, RAW, RLE, HUFFMAN };  // BAD: any other frame

__device__ __forceinline__ u64 get_le(const u8* p, int count) {
    u64 value = 0;
    for (int i = 0; i < count; i++) value |= (u64)p[i] << (8 * i);
    return value;
}

// The place of a block's content in its frame.
struct Literals {
    u32 at;              // offset of the bytes (RAW, RLE), or of the description of the tree (HUFFMAN)
    u32 end, streams;    // HUFFMAN: the end of the literals, and their number of streams
};

// Return the kind of a frame of `size` bytes at p, which should hold n plain bytes, by its headers.
__device__ __forceinline__ u32 kind_of(const u8* p, u32 size, u32 n, Literals& found) {
    const u32 content = n < 256 ? 1 : 2, at = 8 + content;
    if (size < at + 1 || get_le(p, 4) != 0xFD2FB528u || p[4] != (content == 1 ? 0x20 : 0x60)) return BAD;
    if (get_le(p + 5, content) != (content == 1 ? n : n - 256)) return BAD;
    const u32 block = (u32)get_le(p + at - 3, 3), kind = block >> 1 & 3, block_bytes = block >> 3;
    found.at = at;
    if (!(block & 1) || kind == 3) return BAD;
    if (kind == 0) return block_bytes == n && size == at + n ? RAW : BAD;
    if (kind == 1) return block_bytes == n && size == at + 1 ? RLE : BAD;
    if (block_bytes != size - at || block_bytes < 3 || p[size - 1]) return BAD;
    const u64 literals = get_le(p + at, block_bytes < 5 ? block_bytes : 5);
    const u32 form = literals >> 2 & 3, bits = form < 2 ? 10 : 4 * form + 6, header = form < 2 ? 3 : form + 2;
    if ((literals & 3) != 2 || (literals >> 4 & ((1u << bits) - 1)) != n) return BAD;
    found = {at + header, at + header + (u32)(literals >> (4 + bits) & ((1u << bits) - 1)), form ? 4u : 1u};
    return found.end == size - 1 && found.at < found.end ? HUFFMAN : BAD;
}
