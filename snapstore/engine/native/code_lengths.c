// The lengths of Huffman codes for counts of symbols, with a limit.
#include "native.h"

#define MOST_SYMBOLS 288

// Sort keys ascending (Shell 1959); the steps are Ciura's.
static void sort_keys(u32 *keys, int n) {
    static const int STEPS[] = {132, 57, 23, 10, 4, 1};
    for (size_t s = 0; s < sizeof STEPS / sizeof *STEPS; s++) {
        const int step = STEPS[s];
        for (int i = step; i < n; i++) {
            const u32 key = keys[i];
            int j = i;
            for (; j >= step && keys[j - step] > key; j -= step) keys[j] = keys[j - step];
            keys[j] = key;
        }
    }
}

u32 code_lengths(const u32 *counts, u32 symbols, u32 most, u8 *lengths) {
    u32 keys[MOST_SYMBOLS], depths[MOST_SYMBOLS] = {0}, of_length[16] = {0}, longest = 0;
    int n = 0, at = 0;
    for (u32 s = 0; s < symbols; s++)
        if (counts[s]) keys[n++] = counts[s] << 9 | s;
    memset(lengths, 0, symbols);
    if (n < 2) {
        if (n) lengths[keys[0] & 511] = 1;
        return (u32)n;
    }
    sort_keys(keys, n);
    for (int i = 0; i < n; i++) depths[i] = keys[i] >> 9;
    count_depths(depths, n, most, of_length);
    fit_lengths(of_length, most);
    for (u32 bits = most; bits > 0; bits--) {  // the rarest symbols have the longest codes
        if (of_length[bits] && !longest) longest = bits;
        for (u32 i = 0; i < of_length[bits] && at < n; i++) lengths[keys[at++] & 511] = (u8)bits;
    }
    return longest;
}
