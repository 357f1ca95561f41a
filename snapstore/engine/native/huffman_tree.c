// The tree of a zstd frame that is written; see huffman_tree.h.
#include "native.h"

void make_tree(const u32 counts[256], Tree *tree) {
    FseEncoder fse;
    u32 of_length[MAX_BITS + 1] = {0}, next[MAX_BITS + 1];
    u8 weights[256];
    int last = 0;
    tree->max_bits = code_lengths(counts, 256, MAX_BITS, tree->lengths);
    for (int s = 0; s < 256; s++) of_length[tree->lengths[s]]++;
    first_codes(of_length, next);
    for (int s = 0; s < 256; s++) {
        const u32 bits = tree->lengths[s];
        tree->codes[s] = bits ? next[bits]++ | bits << 16 : 0;
        weights[s] = (u8)(bits ? tree->max_bits + 1 - bits : 0);
        if (bits) last = s;
    }
    tree->description_bytes = describe(&fse, weights, last, tree->description);
}
