// Vectors as wide as the target has them, written with GCC's vector extension.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

// LANES floats fill a register. A matrix product keeps TILE_ROWS x TILE_VECTORS accumulators, which leaves a few
// registers for its operands.
#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 8, TILE_VECTORS = 3;
#elif defined(__AVX2__)
constexpr int LANES = 8, TILE_ROWS = 4, TILE_VECTORS = 3;
#else
constexpr int LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 4;
#endif
constexpr int TILE_COLUMNS = LANES * TILE_VECTORS;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef float UnalignedFloats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t UnalignedHalves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t UnalignedInt8 __attribute__((vector_size(LANES), aligned(1), may_alias));

// A scalar beside a vector is spread over its lanes; subtracting 0 changes no number, not even -0.
static inline Floats broadcast(float x) { return x - Floats{}; }

static inline Floats load(const float* p) { return *(const UnalignedFloats*)p; }
static inline void store(float* p, Floats v) { *(UnalignedFloats*)p = v; }

// bfloat16 is the upper half of a float.
static inline Floats load(const uint16_t* p) {
    Ints wide = __builtin_convertvector(*(const UnalignedHalves*)p, Ints);
    return (Floats)(wide << 16);
}

static inline void from_float(float x, float* out) { *out = x; }
static inline void from_float(float x, uint16_t* out) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *out = (x == x) ? (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

static inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
static inline Floats absolute(Floats a) { return (Floats)((Ints)a & 0x7fffffff); }

static inline float sum_lanes(Floats v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

static inline float max_lanes(Floats v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// exp to within 2 units in the last place (Cephes' expf); exactly 0 below -87, and that of 88.5 above it.
static inline Floats exponential(Floats x) {
    const Ints vanishes = x < -87.0f;
    x = vanishes ? broadcast(-87.0f) : x;
    x = x > 88.5f ? broadcast(88.5f) : x;  // a larger exponent would run into the sign
    const float magic = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const Floats shifted = x * 1.44269504088896341f + magic;
    const Floats n = shifted - magic;
    const Ints exponent = ((Ints)shifted - 0x4b400000 + 127) << 23;
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const Floats y = (p * r * r + r + 1.0f) * (Floats)exponent;
    return (Floats)((Ints)y & ~vanishes);
}

// acc[i] += sum over 4 bytes of weights[4 i + b] * x_b, weights unsigned and x signed; x4 holds the four x_b.
static inline Ints dot4(Ints acc, Bytes weights, int32_t x4) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(x4));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)weights, _mm256_set1_epi32(x4));
#else
    const Ints quads = (Ints)weights;
    for (int b = 0; b < 4; b++) acc += ((quads >> (8 * b)) & 255) * (int32_t)(int8_t)(x4 >> (8 * b));
    return acc;
#endif
}
