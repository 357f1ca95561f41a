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

// Replace `n` ascending counts by the depths of their leaves, and count the leaves of each depth, up to
// `most` (Moffat and Katajainen 1995, "In-place calculation of minimum-redundancy codes").
static void count_depths(u32 *a, int n, u32 most, u32 *of_length) {
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
static void fit_lengths(u32 *of_length, u32 most) {
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
