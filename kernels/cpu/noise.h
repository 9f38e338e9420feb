// The noise of sampling, bit for bit that of engine/sampling/noise.py, which says how it is made.
#pragma once

#include <cmath>

#include "simd.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace manta {

typedef uint64_t vlong __attribute__((vector_size(64)));

constexpr int VECTORS = 4;
constexpr int64_t SPAN = VECTORS * LANES;  // tokens whose random bits are made together

constexpr float GUMBEL_MAX = 16.635532f;  // of the largest of the 2^23 values

// The lower 32 bits of each lane times a factor.
inline vlong multiply_low(vlong a, uint32_t factor) {
#if defined(__AVX512F__)
    return (vlong)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    __m256i halves[2];
    memcpy(halves, &a, sizeof a);
    for (auto& half : halves) half = _mm256_mul_epu32(half, _mm256_set1_epi64x(factor));
    memcpy(&a, halves, sizeof a);
    return a;
#else
    return (a & 0xffffffffu) * factor;
#endif
}

// Four lanes of each, in turn: the first four or the last four.
inline vint interleave_low(vlong a, vlong b) {
#ifdef __clang__
    return (vint)__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return (vint)__builtin_shuffle(a, b, vlong{0, 8, 1, 9, 2, 10, 3, 11});
#endif
}
inline vint interleave_high(vlong a, vlong b) {
#ifdef __clang__
    return (vint)__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return (vint)__builtin_shuffle(a, b, vlong{4, 12, 5, 13, 6, 14, 7, 15});
#endif
}

// The 23 random bits of tokens SPAN * span and after, in order: Philox4x32-10, 16 blocks of four tokens at once.
//
// A word lies in the lower half of a 64-bit lane. The upper halves hold what the products left there, which no later
// product reads.
inline void random_bits(uint64_t seed, uint32_t position, int64_t span, vint (&bits)[VECTORS]) {
    vlong c0[2], c1[2], c2[2] = {}, c3[2] = {};
    for (int i = 0; i < 2; i++) {
        c0[i] = vlong{0, 1, 2, 3, 4, 5, 6, 7} + uint64_t(span * (SPAN / 4) + 8 * i);
        c1[i] = vlong{} + position;
    }
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        for (int i = 0; i < 2; i++) {
            vlong p0 = multiply_low(c0[i], 0xD2511F53u), p1 = multiply_low(c2[i], 0xCD9E8D57u);
            c0[i] = (p1 >> 32) ^ c1[i] ^ uint64_t(k0);
            c2[i] = (p0 >> 32) ^ c3[i] ^ uint64_t(k1);
            c1[i] = p1;
            c3[i] = p0;
        }
    }
    for (int i = 0; i < 2; i++) {
        vlong first = (c0[i] & 0xffffffffu) | c1[i] << 32, second = (c2[i] & 0xffffffffu) | c3[i] << 32;
        bits[2 * i] = (vint)((vuint)interleave_low(first, second) >> 9);
        bits[2 * i + 1] = (vint)((vuint)interleave_high(first, second) >> 9);
    }
}

// In double precision and rounded once: libraries that differ in the last bit of that still give the same floats.
inline float gumbel_of_bits(int32_t bits) {
    const double u = (bits + 0.5) * 0x1p-23;
    return float(-std::log(-std::log(u)));
}

}  // namespace manta
