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

    // The chunk in which its first visible key lies. Rows are in the order of their positions.
    int64_t first_chunk() const {
        return window ? std::max<int64_t>(0, position[0] - window + 1) / CHUNK * CHUNK : 0;
    }

    // Where the panels of a chunk's blocks begin in `cache`; what would lie behind the last block is that block again.
    void panels(const T* cache, int64_t start, const T* (&of)[CHUNK_BLOCKS]) const {
        for (int i = 0; i < CHUNK_BLOCKS; i++) {
            const int64_t block = std::min(start + i * BLOCK, context - 1) / BLOCK;
            of[i] = cache + (blocks[block] * kv_heads + kv_head) * BLOCK * head_dim;
        }
    }
};

template <class T>
struct AttentionScratch {
    alignas(64) T query[MAX_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[MAX_ROWS][CHUNK];
    alignas(64) T weights[MAX_ROWS][CHUNK];
    alignas(64) float sums[MAX_ROWS][MAX_HEAD_DIM];
    alignas(64) T tail[BLOCK * MAX_HEAD_DIM];  // values of a block that is not full yet, zeros behind them
};

// What a chunk reads, and what will be read next: blocks lie anywhere in the cache, so that no hardware sees it coming.
template <class T>
struct Panels {
    const T* keys[CHUNK_BLOCKS];
    const T* values[CHUNK_BLOCKS];

    Panels(const Tile<T>& tile, int64_t start) {
        tile.panels(tile.keys, start, keys);
        tile.panels(tile.values, start, values);
    }
};

// Several blocks at once: a few rows alone would leave the multipliers waiting for each other.
template <int ROWS, class T>
inline void find_scores(const T* query, int64_t dim, const Panels<T>& panels, const Panels<T>& next, int blocks,
                        float (*scores)[CHUNK]) {
    constexpr int BLOCKS = ROWS * CHUNK_BLOCKS <= 2 * MAX_ROWS ? CHUNK_BLOCKS : 2;
    for (int first = 0; first < blocks; first += BLOCKS) {
        vfloat acc[ROWS][BLOCKS] = {};
        const T *keys[BLOCKS], *ahead[BLOCKS];
        std::copy_n(panels.keys + first, BLOCKS, keys);
        std::copy_n(next.keys + first, BLOCKS, ahead);
        multiply(query, dim, keys, LANES * STEP<T>, dim / STEP<T>, acc, [&](int64_t step) {
            for (int block = 0; block < BLOCKS; block++) __builtin_prefetch(ahead[block] + step * LANES * STEP<T>);
        });
        for (int row = 0; row < ROWS; row++)
            for (int block = 0; block < BLOCKS; block++) store(&scores[row][(first + block) * BLOCK], acc[row][block]);
    }
}

template <int ROWS, int VECTORS, class T>
inline void add_values(const T (*weights)[CHUNK], const Panels<T>& panels, const Panels<T>& next, int blocks,
                       int64_t dim, int64_t column, float (*sums)[MAX_HEAD_DIM]) {
    vfloat acc[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) acc[row][v] = load(&sums[row][column + v * LANES]);
    for (int block = 0; block < blocks; block++) {
        const T *columns[VECTORS], *ahead = next.values[block] + column * STEP<T>;
        for (int v = 0; v < VECTORS; v++) columns[v] = panels.values[block] + (column + v * LANES) * STEP<T>;
        multiply(&weights[0][block * BLOCK], CHUNK, columns, dim * STEP<T>, BLOCK / STEP<T>, acc, [&](int64_t step) {
            for (int v = 0; v < VECTORS; v++) __builtin_prefetch(ahead + (step * dim + v * LANES) * STEP<T>);
        });
    }
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) store(&sums[row][column + v * LANES], acc[row][v]);
}

// One round of the softmax: scores to weights, with the sums so far brought to the new maximum. All exponents are of 2.
template <class T>
inline void softmax_round(const Tile<T>& tile, AttentionScratch<T>& scratch, int64_t start, int row, float& peak,
                          vfloat& total) {
    const int64_t last = tile.position[row], first = tile.window ? last - tile.window + 1 : 0;
    vfloat scores[CHUNK_BLOCKS];
    for (int i = 0; i < CHUNK_BLOCKS; i++) scores[i] = load(&scratch.scores[row][i * LANES]) * (tile.scale * LOG2_E);
    if (first > start || last + 1 < start + CHUNK) {
        vint lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        const int from = int(std::clamp<int64_t>(first - start, 0, CHUNK));
        const int to = int(std::clamp<int64_t>(last + 1 - start, 0, CHUNK));
        for (int i = 0; i < CHUNK_BLOCKS; i++) {
            const vint key = lane + i * LANES;
            scores[i] = (key >= from) & (key < to) ? scores[i] : splat(-INFINITY);
        }
    }
    const float next = std::max(peak, reduce_max(vmax(vmax(scores[0], scores[1]), vmax(scores[2], scores[3]))));
    // A row of which the chunk shows nothing keeps what it has.
    const float shift = next == -INFINITY ? 0.0f : next;
    if (next != peak) {
        const vfloat correction = vexp2<float>(splat(peak - shift));
        total *= correction;
        for (int64_t d = 0; d < tile.head_dim; d += LANES)
            store(&scratch.sums[row][d], load(&scratch.sums[row][d]) * correction);
        peak = next;
    }
    for (int i = 0; i < CHUNK_BLOCKS; i++) {
        const vfloat weight = vexp2<T>(scores[i] - shift);
        total += weight;
        store(&scratch.weights[row][i * LANES], weight);
    }
}

// The values of a block's first keys, with zeros behind them.
template <class T>
inline void copy_keys(const T* from, int64_t keys, int64_t dim, T* to) {
    const int64_t whole = keys / STEP<T> * STEP<T> * dim;
    std::copy_n(from, whole, to);
    std::fill(to + whole, to + BLOCK * dim, T{});
    for (int64_t rest = 0; rest < keys % STEP<T>; rest++)
        for (int64_t d = 0; d < dim; d++) to[whole + d * STEP<T> + rest] = from[whole + d * STEP<T> + rest];
}

// following: the tile that this thread computes next.
template <int ROWS, class T>
void attend(const Tile<T>& tile, const Tile<T>& following, AttentionScratch<T>& scratch) {
    const int64_t dim = tile.head_dim;
    float peak[ROWS];
    vfloat total[ROWS];
    for (int row = 0; row < ROWS; row++) {
        std::copy_n(tile.query[row], dim, scratch.query + row * dim);
        std::fill_n(scratch.sums[row], dim, 0.0f);
        peak[row] = -INFINITY;
        total[row] = vfloat{};
    }
    const int64_t highest = tile.position[ROWS - 1];
    int64_t start = tile.first_chunk();
    for (Panels<T> panels(tile, start); start <= highest;) {
        const int64_t after = start + CHUNK;
        const Panels<T> next = after <= highest ? Panels<T>(tile, after) : Panels<T>(following, following.first_chunk());
        const int64_t keys = std::min<int64_t>(CHUNK, highest + 1 - start);
        const int blocks = int((keys + BLOCK - 1) / BLOCK);
        const int64_t valid = tile.context - start - (blocks - 1) * BLOCK;  // keys of the last block and behind it
        if (valid < BLOCK) {
            // What lies behind the last key was never written: not even zero times it may be added. (Later keys of the
            // same request are added so: one that is not finite shows in the rows before it.)
            copy_keys(panels.values[blocks - 1], valid, dim, scratch.tail);
            panels.values[blocks - 1] = scratch.tail;
        }
        find_scores<ROWS>(scratch.query, dim, panels, next, blocks, scratch.scores);
        for (int row = 0; row < ROWS; row++) softmax_round(tile, scratch, start, row, peak[row], total[row]);
        int64_t column = 0;
        if constexpr (ROWS * 4 <= 2 * MAX_ROWS)
            for (; column + 4 * LANES <= dim; column += 4 * LANES)
                add_values<ROWS, 4>(scratch.weights, panels, next, blocks, dim, column, scratch.sums);
        for (; column + 2 * LANES <= dim; column += 2 * LANES)
            add_values<ROWS, 2>(scratch.weights, panels, next, blocks, dim, column, scratch.sums);
        for (; column < dim; column += LANES)
            add_values<ROWS, 1>(scratch.weights, panels, next, blocks, dim, column, scratch.sums);
        panels = next;
        start = after;
    }
    for (int row = 0; row < ROWS; row++) {
        const float inverse = 1.0f / reduce_add(total[row]);
        for (int64_t d = 0; d < dim; d += LANES) store(tile.out[row] + d, load(&scratch.sums[row][d]) * inverse);
    }
}

}  // namespace manta
