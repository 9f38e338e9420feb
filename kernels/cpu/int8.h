// Products with int8 weights that have one scale for each output and GROUP inputs; the activations stay as they are, or
// are brought to int8 as well, with one scale for each row and group (Yao et al. 2022, ZeroQuant).
//
// A group's sum is multiplied by its scales and added to the row's float32 sums, group after group. That order is the
// same for any number of rows: a row's result does not depend on which rows are computed with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace manta {

constexpr int GROUP = 64;      // inputs that share a scale
constexpr int QUAD = 4;        // int8 values in a 32-bit lane
constexpr int INT8_ROWS = 96;  // rows whose sums are held at once
constexpr int64_t AHEAD = 4096;  // weights are fetched so many bytes before they are used

// Weights of a panel's columns for a group of inputs, zero behind the last input. Values: [GROUP / step][PANEL][step],
// where step is STEP of the activations' type, or QUAD.
struct Int8Weights {
    float scales[PANEL];
    int8_t values[GROUP * PANEL];
};

// A row's activations of a group, zero behind the last one.
struct Int8Activations {
    int8_t values[GROUP];
    float scale;
    int32_t sum;  // of the values
};

inline int64_t groups_of(int64_t features) { return (features + GROUP - 1) / GROUP; }

// ---- activations to int8 ----

// A group with a NaN or an infinity gets that as its scale, so that it is seen in the row's results.
template <class T>
inline void quantize(const T* from, int64_t count, Int8Activations& to) {
    vfloat values[GROUP / LANES] = {};
    vint peaks = {};
    for (int v = 0; v < GROUP / LANES; v++) {
        const int64_t start = v * LANES;
        if (start + LANES <= count)
            values[v] = load(from + start);
        else
            for (int64_t i = start; i < count; i++) values[v][i - start] = to_float(from[i]);
        // As integers magnitudes have the order that they have as floats, and NaN is the greatest.
        vint magnitude = (vint)values[v] & 0x7fffffff;
        peaks = magnitude > peaks ? magnitude : peaks;
    }
    int32_t peak_bits = 0;
    for (int i = 0; i < LANES; i++) peak_bits = std::max(peak_bits, int32_t(peaks[i]));
    float peak;
    memcpy(&peak, &peak_bits, 4);
    const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
    const vfloat magic = splat(12582912.0f);  // adding it rounds to a whole number, which then stands in the low bits
    vint sums = {};
    for (int v = 0; v < GROUP / LANES; v++) {
        vint whole = (vint)(values[v] * inverse + magic) << 24 >> 24;
        sums += whole;
        store(to.values + v * LANES, whole);
    }
    to.scale = peak / 127.0f;
    to.sum = 0;
    for (int i = 0; i < LANES; i++) to.sum += sums[i];
}

template <class T>
inline void quantize_row(const T* from, int64_t size, Int8Activations* to) {
    for (int64_t start = 0; start < size; start += GROUP, to++)
        quantize(from + start, std::min<int64_t>(GROUP, size - start), *to);
}

// ---- one group of a product ----

// Multiplies by the scales and adds to the sums of rows.
template <int ROWS>
inline void add_scaled(const vfloat (&group)[ROWS][2], const float* scales, float (*sums)[PANEL]) {
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < 2; v++) {
            float* to = &sums[row][v * LANES];
            store(to, load(to) + group[row][v] * load(scales + v * LANES));
        }
}

inline void widen(const int8_t* from, float* to) { store(to, floats(from)); }
inline void widen(const int8_t* from, bf16* to) {
    vint two = pairs(from);
    memcpy(to, &two, sizeof two);
}

// Weights in the activations' type, for a product with more rows than `multiply` takes at once.
template <class T>
inline void widen(const Int8Weights& from, T* to) {
    for (int i = 0; i < GROUP * PANEL; i += 64) {
        __builtin_prefetch(from.values + i + AHEAD);
        for (int v = i; v < i + 64; v += LANES * STEP<T>) widen(from.values + v, to + v);
    }
}

// weights: values of int8, or what they were widened to.
template <int ROWS, class T, class W>
inline void add_group(const T* a, int64_t lda, int64_t inputs, const W* weights, const float* scales, int rows,
                      float (*sums)[PANEL]) {
    if constexpr (ROWS > 0) {
        if (rows < ROWS) return add_group<ROWS - 1>(a, lda, inputs, weights, scales, rows, sums);
        vfloat acc[ROWS][2] = {};
        const W* columns[2] = {weights, weights + LANES * STEP<T>};
        multiply(a, lda, columns, PANEL * STEP<T>, inputs / STEP<T>, acc, [&](int64_t step) {
            if (sizeof(W) == 1) __builtin_prefetch(weights + step * PANEL * STEP<T> + AHEAD);
        });
        add_scaled<ROWS>(acc, scales, sums);
    }
}

// Four products of int8 in each lane, added to acc. VNNI multiplies unsigned by signed values: there weights are moved
// up by 128, and acc starts at what that adds too much.
#ifdef __AVX512VNNI__
inline vint weights_of(const int8_t* from) {
    vint quads;
    memcpy(&quads, from, sizeof quads);
    return quads ^ int32_t(0x80808080u);
}
inline vint start_of(const Int8Activations& a) { return vint{} - 128 * a.sum; }
inline vint add_dot(vint acc, vint weights, int32_t quad) {
    return (vint)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(quad));
}
#else
typedef int16_t vshort __attribute__((vector_size(64)));
inline vint weights_of(const int8_t* from) {
    vint quads;
    memcpy(&quads, from, sizeof quads);
    return quads;
}
inline vint start_of(const Int8Activations&) { return vint{}; }
inline vint add_pairs(vshort a, vshort b) {
#if defined(__AVX512BW__)
    return (vint)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    __m256i left[2], right[2];
    memcpy(left, &a, sizeof a);
    memcpy(right, &b, sizeof b);
    for (int half = 0; half < 2; half++) left[half] = _mm256_madd_epi16(left[half], right[half]);
    vint result;
    memcpy(&result, left, sizeof result);
    return result;
#else
    vint x = (vint)a, y = (vint)b;
    return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}
inline vint add_dot(vint acc, vint weights, int32_t quad) {
    vshort left = (vshort)(vint{} + quad), right = (vshort)weights;
    return acc + add_pairs(left << 8 >> 8, right << 8 >> 8) + add_pairs(left >> 8, right >> 8);
}
#endif

template <int ROWS>
inline void add_group(const Int8Activations* a, int64_t lda, const Int8Weights& weights, int rows,
                      float (*sums)[PANEL]) {
    if constexpr (ROWS > 0) {
        if (rows < ROWS) return add_group<ROWS - 1>(a, lda, weights, rows, sums);
        vint acc[ROWS][2];
        for (int row = 0; row < ROWS; row++) acc[row][0] = acc[row][1] = start_of(a[row * lda]);
        for (int i = 0; i < GROUP; i += QUAD) {
            vint right[2];
            for (int v = 0; v < 2; v++) {
                const int8_t* from = weights.values + i * PANEL + v * LANES * QUAD;
                __builtin_prefetch(from + AHEAD);
                right[v] = weights_of(from);
            }
            for (int row = 0; row < ROWS; row++) {
                int32_t quad;
                memcpy(&quad, a[row * lda].values + i, sizeof quad);
                for (int v = 0; v < 2; v++) acc[row][v] = add_dot(acc[row][v], right[v], quad);
            }
        }
        vfloat group[ROWS][2];
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < 2; v++)
                group[row][v] = to_float(acc[row][v]) * a[row * lda].scale;
        add_scaled<ROWS>(group, weights.scales, sums);
    }
}

// ---- a panel's product with any number of rows ----

// Calls add(group, row, rows, sums) for each group and tile of rows, then finish(row, sums) for each row.
template <class Unpack, class Add, class Finish>
inline void each_group(int64_t groups, const float* bias, int64_t count, Unpack unpack, Add add, Finish finish) {
    alignas(64) float sums[INT8_ROWS][PANEL];
    for (int64_t first = 0; first < count; first += INT8_ROWS) {
        const int64_t rows = std::min<int64_t>(INT8_ROWS, count - first);
        for (int64_t row = 0; row < rows; row++)
            for (int v = 0; v < PANEL; v += LANES) store(&sums[row][v], bias ? load(bias + v) : vfloat{});
        for (int64_t group = 0; group < groups; group++) {
            unpack(group);
            for (int64_t row = 0; row < rows;) {
                const int pass = rows_of_pass(rows - row);
                add(group, first + row, pass, sums + row);
                row += pass;
            }
        }
        for (int64_t row = 0; row < rows; row++) {
            vfloat done[2] = {load(&sums[row][0]), load(&sums[row][LANES])};
            finish(first + row, done);
        }
    }
}

// [count, in_features] times a panel, [groups]. bias: of the panel's columns, or null.
template <class T, class Finish>
inline void int8_product(const T* a, int64_t in_features, const Int8Weights* panel, const float* bias, int64_t count,
                         Finish finish) {
    alignas(64) T wide[GROUP * PANEL];
    each_group(
        groups_of(in_features), bias, count,
        [&](int64_t group) {
            if (count > MAX_ROWS) widen(panel[group], wide);
        },
        [&](int64_t group, int64_t row, int rows, float (*sums)[PANEL]) {
            const Int8Weights& weights = panel[group];
            const int64_t start = group * GROUP, inputs = std::min<int64_t>(GROUP, in_features - start);
            const T* from = a + row * in_features + start;
            if (count > MAX_ROWS)
                add_group<MAX_ROWS>(from, in_features, inputs, wide, weights.scales, rows, sums);
            else
                add_group<MAX_ROWS>(from, in_features, inputs, weights.values, weights.scales, rows, sums);
        },
        finish);
}

template <class Finish>
inline void int8_product(const Int8Activations* a, int64_t in_features, const Int8Weights* panel, const float* bias,
                         int64_t count, Finish finish) {
    const int64_t groups = groups_of(in_features);
    each_group(
        groups, bias, count, [](int64_t) {},
        [&](int64_t group, int64_t row, int rows, float (*sums)[PANEL]) {
            add_group<MAX_ROWS>(a + row * groups + group, groups, panel[group], rows, sums);
        },
        finish);
}

}  // namespace manta
