// Attention of a tile of query rows over paged keys and values, with an online softmax (Milakov and Gimelshein 2018).
//
// Keys are stored as panels of 16 keys: float32 [block][kv_head][head_dim][16], bfloat16 [..][head_dim / 2][16][2].
// Values as panels of head_dim columns: float32 [block][kv_head][16][head_dim], bfloat16 [..][8][head_dim][2].
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace manta {

constexpr int BLOCK = 16;          // keys in a KV block
constexpr int CHUNK_BLOCKS = 4;    // blocks that share one round of the softmax
constexpr int CHUNK = BLOCK * CHUNK_BLOCKS;
constexpr int MAX_HEAD_DIM = 256;

// What one tile attends over. Chunks of keys start at multiples of CHUNK of the request's own positions, so that a
// row's result does not depend on the rows beside it, nor on how its prompt was cut into steps.
template <class T>
struct Tile {
    const T* keys;             // cache of the layer
    const T* values;
    const int32_t* blocks;     // the request's block table
    int64_t context;           // keys of the request that have been written
    int64_t kv_heads, kv_head;
    int64_t head_dim;
    int64_t window;            // keys that a row sees, itself included; 0 is all
    float scale;
    int rows;
    const T* query[MAX_ROWS];  // head_dim elements each
    T* out[MAX_ROWS];
    int64_t position[MAX_ROWS];

    int64_t panel(int64_t block) const { return (blocks[block] * kv_heads + kv_head) * BLOCK * head_dim; }
};

template <class T>
struct AttentionScratch {
    alignas(64) T query[MAX_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[MAX_ROWS][CHUNK];
    alignas(64) T weights[MAX_ROWS][CHUNK];
    alignas(64) float sums[MAX_ROWS][MAX_HEAD_DIM];
    alignas(64) T tail[BLOCK * MAX_HEAD_DIM];  // values of a block that is not full yet, zeros behind them
};

// Blocks lie anywhere in the cache: without this each would be waited for.
template <class T>
inline void fetch(const Tile<T>& tile, const T* cache, int64_t start) {
    const int64_t last = std::min<int64_t>(tile.context, start + CHUNK);
    for (int64_t key = start; key < last; key += BLOCK) {
        const T* panel = cache + tile.panel(key / BLOCK);
        for (int64_t at = 0; at < BLOCK * tile.head_dim; at += 64 / int64_t(sizeof(T))) __builtin_prefetch(panel + at);
    }
}

template <int ROWS, class T>
inline void scores_of_block(const T* query, int64_t dim, const T* panel, float (*scores)[CHUNK], int column) {
    vfloat acc[ROWS][1] = {};
    multiply<ROWS, 1>(query, dim, panel, LANES * STEP<T>, dim / STEP<T>, acc);
    for (int row = 0; row < ROWS; row++) store(&scores[row][column], acc[row][0]);
}

// Four blocks at once: a few rows alone would leave the multipliers waiting for each other.
template <int ROWS, class T>
inline void scores_of_chunk(const T* query, int64_t dim, const T* const* panels, float (*scores)[CHUNK]) {
    vfloat acc[ROWS][CHUNK_BLOCKS] = {};
    for (int64_t s = 0; s < dim / STEP<T>; s++)
        for (int block = 0; block < CHUNK_BLOCKS; block++) {
            vfloat column[ROWS][1];
            for (int row = 0; row < ROWS; row++) column[row][0] = acc[row][block];
            multiply<ROWS, 1>(query + s * STEP<T>, dim, panels[block] + s * LANES * STEP<T>, 0, 1, column);
            for (int row = 0; row < ROWS; row++) acc[row][block] = column[row][0];
        }
    for (int row = 0; row < ROWS; row++)
        for (int block = 0; block < CHUNK_BLOCKS; block++) store(&scores[row][block * BLOCK], acc[row][block]);
}

template <int ROWS, int VECTORS, class T>
inline void add_values(const T (*weights)[CHUNK], const T* const* panels, int blocks, int64_t dim, int64_t column,
                       float (*sums)[MAX_HEAD_DIM]) {
    vfloat acc[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) acc[row][v] = load(&sums[row][column + v * LANES]);
    for (int block = 0; block < blocks; block++)
        multiply<ROWS, VECTORS>(&weights[0][block * BLOCK], CHUNK, panels[block] + column * STEP<T>, dim * STEP<T>,
                                BLOCK / STEP<T>, acc);
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) store(&sums[row][column + v * LANES], acc[row][v]);
}

// One round of the softmax: scores to weights, with the sums so far brought to the new maximum.
template <class T>
inline void softmax_round(const Tile<T>& tile, AttentionScratch<T>& scratch, int64_t start, int keys, int row,
                          float& peak, float& total) {
    float* scores = scratch.scores[row];
    int64_t last = tile.position[row];
    int64_t first = tile.window ? std::max<int64_t>(0, last - tile.window + 1) : 0;
    int from = int(std::clamp<int64_t>(first - start, 0, keys)), to = int(std::clamp<int64_t>(last + 1 - start, 0, keys));
    vint lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const vfloat nothing = splat(-INFINITY);
    vfloat best = nothing;
    for (int at = 0; at < CHUNK; at += LANES) {
        vint key = lane + at;
        vfloat score = load(scores + at) * tile.scale;
        score = (key >= from) & (key < to) ? score : nothing;
        store(scores + at, score);
        best = vmax(best, score);
    }
    float next = std::max(peak, reduce_max(best));
    // A row of which the chunk shows nothing keeps what it has.
    float shift = next == -INFINITY ? 0.0f : next;
    float correction = peak == next ? 1.0f : vexp(splat(peak - shift))[0];
    vfloat added = {};
    for (int at = 0; at < CHUNK; at += LANES) {
        vfloat weight = vexp(load(scores + at) - shift);
        added += weight;
        store(&scratch.weights[row][at], weight);
    }
    total = total * correction + reduce_add(added);
    if (correction != 1.0f)
        for (int64_t d = 0; d < tile.head_dim; d += LANES) store(&scratch.sums[row][d], load(&scratch.sums[row][d]) * correction);
    peak = next;
}

template <int ROWS, class T>
void attend(const Tile<T>& tile, AttentionScratch<T>& scratch) {
    const int64_t dim = tile.head_dim;
    float peak[ROWS], total[ROWS];
    int64_t lowest = tile.position[0], highest = tile.position[0];
    for (int row = 0; row < ROWS; row++) {
        std::copy_n(tile.query[row], dim, scratch.query + row * dim);
        std::fill_n(scratch.sums[row], dim, 0.0f);
        peak[row] = -INFINITY;
        total[row] = 0.0f;
        lowest = std::min(lowest, tile.position[row]);
        highest = std::max(highest, tile.position[row]);
    }
    int64_t first = tile.window ? std::max<int64_t>(0, lowest - tile.window + 1) / CHUNK * CHUNK : 0;
    for (int64_t start = first; start <= highest; start += CHUNK) {
        const int keys = int(std::min<int64_t>(CHUNK, tile.context - start));
        const int blocks = (keys + BLOCK - 1) / BLOCK;
        const T *key_panels[CHUNK_BLOCKS], *value_panels[CHUNK_BLOCKS];
        for (int block = 0; block < blocks; block++) {
            int64_t at = tile.panel(start / BLOCK + block);
            key_panels[block] = tile.keys + at;
            value_panels[block] = tile.values + at;
        }
        for (int block = blocks; block < CHUNK_BLOCKS; block++)
            for (int row = 0; row < ROWS; row++) std::fill_n(&scratch.scores[row][block * BLOCK], BLOCK, 0.0f);
        if (keys % BLOCK) {
            // What lies behind the last key was never written: not even zero times it may be added.
            const T* from = value_panels[blocks - 1];
            const int valid = keys % BLOCK;
            T zero;
            assign(zero, 0.0f);
            for (int key = 0; key < BLOCK; key++)
                for (int64_t d = 0; d < dim; d++) {
                    int64_t at = (key / STEP<T> * dim + d) * STEP<T> + key % STEP<T>;
                    scratch.tail[at] = key < valid ? from[at] : zero;
                }
            value_panels[blocks - 1] = scratch.tail;
        }
        fetch(tile, tile.keys, start + CHUNK);
        if constexpr (ROWS * CHUNK_BLOCKS <= 2 * MAX_ROWS) {
            if (blocks == CHUNK_BLOCKS)
                scores_of_chunk<ROWS>(scratch.query, dim, key_panels, scratch.scores);
            else
                for (int block = 0; block < blocks; block++)
                    scores_of_block<ROWS>(scratch.query, dim, key_panels[block], scratch.scores, block * BLOCK);
        } else {
            for (int block = 0; block < blocks; block++)
                scores_of_block<ROWS>(scratch.query, dim, key_panels[block], scratch.scores, block * BLOCK);
        }
        for (int row = 0; row < ROWS; row++) softmax_round(tile, scratch, start, keys, row, peak[row], total[row]);
        fetch(tile, tile.values, start + CHUNK);
        int64_t column = 0;
        if constexpr (ROWS * 4 <= 2 * MAX_ROWS)
            for (; column + 4 * LANES <= dim; column += 4 * LANES)
                add_values<ROWS, 4>(scratch.weights, value_panels, blocks, dim, column, scratch.sums);
        for (; column + 2 * LANES <= dim; column += 2 * LANES)
            add_values<ROWS, 2>(scratch.weights, value_panels, blocks, dim, column, scratch.sums);
        for (; column < dim; column += LANES)
            add_values<ROWS, 1>(scratch.weights, value_panels, blocks, dim, column, scratch.sums);
    }
    for (int row = 0; row < ROWS; row++) {
        float inverse = 1.0f / total[row];
        for (int64_t d = 0; d < dim; d += LANES) store(tile.out[row] + d, load(&scratch.sums[row][d]) * inverse);
    }
}

}  // namespace manta
