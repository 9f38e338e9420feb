// Vectors of 16 floats, bfloat16, and the few operations on them that differ between instruction sets.
//
// The vector types are the compiler's: the same source becomes AVX-512, AVX2 or whatever the target has. Only the
// bfloat16 dot product has an instruction that the compiler does not find by itself.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace manta {

typedef float vfloat __attribute__((vector_size(64)));
typedef int32_t vint __attribute__((vector_size(64)));
typedef uint32_t vuint __attribute__((vector_size(64)));

constexpr int LANES = 16;

// Rows that one pass over a panel computes: as many as leave their sums in registers.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 3;
#else
constexpr int MAX_ROWS = 2;
#endif

// Rows of the next pass, where so many are left. A few that were left for the end would make the multipliers wait for
// each other.
inline int rows_of_pass(int64_t left) {
    return int(left <= MAX_ROWS ? left : left < MAX_ROWS * 3 / 2 ? (left + 1) / 2 : MAX_ROWS);
}

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// Round to nearest even; NaN stays NaN.
inline void assign(float& to, float x) { to = x; }
inline void assign(bf16& to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to.bits = (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline vfloat to_float(vint x) { return __builtin_convertvector(x, vfloat); }

inline vfloat splat(float x) { return vfloat{} + x; }

inline vfloat load(const float* from) {
    vfloat result;
    memcpy(&result, from, sizeof result);
    return result;
}
inline vfloat load(const bf16* from) {
    typedef uint16_t half __attribute__((vector_size(32)));
    half bits;
    memcpy(&bits, from, sizeof bits);
    vuint wide = __builtin_convertvector(bits, vuint) << 16;
    return (vfloat)wide;
}

inline vint load(const int8_t* from) {
#ifdef __AVX512F__
    return (vint)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    // In two steps: for one from 8 to 32 bits the compiler takes the values apart.
    typedef int8_t bytes __attribute__((vector_size(16)));
    typedef int16_t words __attribute__((vector_size(32)));
    bytes values;
    memcpy(&values, from, sizeof values);
    return __builtin_convertvector(__builtin_convertvector(values, words), vint);
#endif
}

inline void store(float* to, vfloat x) { memcpy(to, &x, sizeof x); }
inline void store(bf16* to, vfloat x) {
#ifdef __AVX512BF16__
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &rounded, 32);
#else
    typedef uint16_t half __attribute__((vector_size(32)));
    vuint bits = (vuint)x;
    vuint rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    vuint nan = bits >> 16 | 0x40u;
    rounded = ((bits & 0x7fffffffu) > 0x7f800000u) ? nan : rounded;
    half narrow = __builtin_convertvector(rounded, half);
    memcpy(to, &narrow, sizeof narrow);
#endif
}

inline void store(int8_t* to, vint x) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int i = 0; i < LANES; i++) to[i] = int8_t(x[i]);
#endif
}

inline vfloat vmax(vfloat a, vfloat b) {
#ifdef __AVX512F__
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float reduce_add(vfloat x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}
inline float reduce_max(vfloat x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
#endif
}

// e^x, exactly 0 below -87, e^-87 of a NaN; two units in the last place. Cody-Waite reduction, then a polynomial of degree 6.
inline vfloat vexp(vfloat x) {
    const vfloat magic = splat(12582912.0f);  // adding it rounds to a whole number, which then stands in the low bits
    vfloat low = splat(-87.0f);
    vfloat clamped = x > low ? x : low;
    clamped = clamped < splat(88.0f) ? clamped : splat(88.0f);
    vfloat shifted = clamped * 1.44269504088896341f + magic;
    vfloat n = shifted - magic;
    vfloat r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vfloat p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vint scale = ((vint)shifted << 23) + (127 << 23);
    vfloat result = p * (vfloat)scale;
    return x < low ? vfloat{} : result;
}

constexpr float LOG2_E = 1.44269504088896341f;

// 2^x, exactly 0 far below -126; to the precision of float32, or with a relative error of 3e-6 for what becomes
// bfloat16. Minimax polynomials on [-1/2, 1/2] that are 1 at 0.
template <class T>
inline vfloat vexp2(vfloat x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const vfloat r = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_NO_EXC);
    const vfloat n = x - r;
#else
    const vfloat magic = splat(12582912.0f);  // adding it rounds to a whole number, which then stands in the low bits
    vfloat clamped = x < splat(-126.0f) ? splat(-126.0f) : x;
    clamped = clamped > splat(127.0f) ? splat(127.0f) : clamped;
    const vfloat shifted = clamped + magic;
    const vfloat r = clamped - (shifted - magic);
#endif
    vfloat p;
    if constexpr (sizeof(T) == 4) {
        p = splat(1.5353362e-4f);
        p = p * r + 1.3398874e-3f;
        p = p * r + 9.6184369e-3f;
        p = p * r + 5.5503324e-2f;
        p = p * r + 2.4022648e-1f;
        p = p * r + 6.9314718e-1f;
    } else {
        p = splat(9.5828529e-3f);
        p = p * r + 5.5906426e-2f;
        p = p * r + 2.4024099e-1f;
        p = p * r + 6.9312418e-1f;
    }
    p = p * r + 1.0f;
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const vint scale = ((vint)shifted << 23) + (127 << 23);
    const vfloat result = p * (vfloat)scale;
    return x < splat(-126.0f) ? vfloat{} : result;
#endif
}

// ---- panels: the right-hand side of a product ----
//
// float32: [k][columns]; bfloat16: [k / 2][columns][2], so that one 32-bit lane holds two steps of k. Panels of int8
// have the same orders, and are widened on their way.

constexpr int PANEL = 32;  // columns of a packed weight's panel

template <class T>
constexpr int STEP = 1;  // values of k that one step takes
template <>
constexpr int STEP<bf16> = 2;

// One step of 16 columns in float32.
inline vfloat floats(const float* b) { return load(b); }
inline vfloat floats(const int8_t* b) { return to_float(load(b)); }

// One step of 16 columns in pairs of bfloat16, which has all of int8.
inline vint pairs(const bf16* b) {
    vint result;
    memcpy(&result, b, sizeof result);
    return result;
}
inline vint pairs(const int8_t* b) {
#ifdef __AVX512BF16__
    return (vint)_mm512_cvtne2ps_pbh((__m512)floats(b + LANES), (__m512)floats(b));
#else
    typedef int16_t words __attribute__((vector_size(32)));
    words two;
    memcpy(&two, b, sizeof two);
    vint wide = __builtin_convertvector(two, vint);
    vuint first = (vuint)to_float(wide << 24 >> 24), second = (vuint)to_float(wide >> 8);
    return (vint)(first >> 16 | second);
#endif
}

// acc[row][v] += sum over steps of a[row][step] * b[v][step][0 ... 15].
//
// The order of the sum is that of the steps, whatever ROWS and VECTORS are: a row's result does not depend on which
// rows are computed with it.
//
// a: rows of lda elements. b: where each vector's columns begin; each step is ldb elements on. fetch(step) may bring
// into the cache what is needed later: memory is then read while the sums are computed.
template <int ROWS, int VECTORS, class B, class Fetch>
inline void multiply(const float* a, int64_t lda, const B* const (&b)[VECTORS], int64_t ldb, int64_t steps,
                     vfloat (&acc)[ROWS][VECTORS], Fetch fetch) {
    for (int64_t s = 0; s < steps; s++) {
        vfloat right[VECTORS];
        for (int v = 0; v < VECTORS; v++) right[v] = floats(b[v] + s * ldb);
        fetch(s);
        for (int row = 0; row < ROWS; row++) {
            vfloat left = splat(a[row * lda + s]);
            for (int v = 0; v < VECTORS; v++) acc[row][v] += left * right[v];
        }
    }
}

template <int ROWS, int VECTORS, class B, class Fetch>
inline void multiply(const bf16* a, int64_t lda, const B* const (&b)[VECTORS], int64_t ldb, int64_t steps,
                     vfloat (&acc)[ROWS][VECTORS], Fetch fetch) {
    for (int64_t s = 0; s < steps; s++) {
        vint right[VECTORS];
        for (int v = 0; v < VECTORS; v++) right[v] = pairs(b[v] + s * ldb);
        fetch(s);
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            memcpy(&pair, a + row * lda + 2 * s, 4);
#ifdef __AVX512BF16__
            __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
            for (int v = 0; v < VECTORS; v++)
                acc[row][v] = (vfloat)_mm512_dpbf16_ps((__m512)acc[row][v], left, (__m512bh)right[v]);
#else
            float first, second;
            uint32_t low = uint32_t(pair) << 16, high = uint32_t(pair) & 0xffff0000u;
            memcpy(&first, &low, 4);
            memcpy(&second, &high, 4);
            for (int v = 0; v < VECTORS; v++) {
                acc[row][v] += splat(first) * (vfloat)(right[v] << 16);
                acc[row][v] += splat(second) * (vfloat)(right[v] & int32_t(0xffff0000u));
            }
#endif
        }
    }
}

}  // namespace manta
