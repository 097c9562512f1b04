// Sixteen floats as one value, the same results on every instruction set: two registers with AVX2, one with AVX-512.
// Every sum has a fixed order, and a product is rounded before its sum unless `fma` says otherwise (-ffp-contract=off).
// Included by one file per instruction set, which defines LANES (8 or 16) and selects the instructions.

#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

typedef uint16_t bf16;

#if LANES == 16
typedef __m512 vec;
inline vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vec a) { _mm512_storeu_ps(p, a); }
inline vec every(float a) { return _mm512_set1_ps(a); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
inline vec load(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline vec power_of_two(vec n) {  // of whole numbers within -127..127
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
#else
typedef __m256 vec;
inline vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vec a) { _mm256_storeu_ps(p, a); }
inline vec every(float a) { return _mm256_set1_ps(a); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
inline vec load(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline vec power_of_two(vec n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
#endif

constexpr int SIXTEEN = 16 / LANES;  // registers of sixteen floats

struct v16 {
    vec part[SIXTEEN];
};

template <class T>
inline v16 load16(const T* p) {
    v16 a;
    for (int i = 0; i < SIXTEEN; i++) a.part[i] = load(p + i * LANES);
    return a;
}
inline v16 every16(float x) {
    v16 a;
    for (int i = 0; i < SIXTEEN; i++) a.part[i] = every(x);
    return a;
}
#define EACH(name, expression)                                    \
    inline v16 name(v16 a, v16 b) {                               \
        for (int i = 0; i < SIXTEEN; i++) {                       \
            vec x = a.part[i], y = b.part[i];                     \
            a.part[i] = expression;                               \
        }                                                         \
        return a;                                                 \
    }
EACH(operator+, x + y)
EACH(operator-, x - y)
EACH(operator*, x * y)
EACH(operator/, x / y)
EACH(larger, larger(x, y))
#undef EACH
inline v16 fma(v16 a, v16 b, v16 c) {
    for (int i = 0; i < SIXTEEN; i++) c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
    return c;
}

inline float sum(v16 a) {  // ((0 + 8) + (4 + 12)) + ..., the same tree on every instruction set
    float x[16];
    for (int i = 0; i < SIXTEEN; i++) store(x + i * LANES, a.part[i]);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}
inline float largest(v16 a) {
    float x[16];
    for (int i = 0; i < SIXTEEN; i++) store(x + i * LANES, a.part[i]);
    for (int i = 1; i < 16; i++) x[0] = x[i] > x[0] ? x[i] : x[0];
    return x[0];
}

// From 8 rows of 8 numbers: row i holds column i of rows 0 to 3, then column i + 4 of them, for i < 4, and row i + 4 the
// same of rows 4 to 7.
inline void turned(__m256 r[8]) {
    __m256 s[8];
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
}

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
    union { uint32_t bits; float number; } u = {(uint32_t)x << 16};
    return u.number;
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {  // to the nearest, ties to even, as torch rounds
    union { float number; uint32_t bits; } u = {x};
    if (x != x) *p = 0x7fc0;
    else *p = (uint16_t)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}
template <class T>
inline float rounded(float x) {
    T y;
    put(&y, x);
    return wide(y);
}
inline void store16(float* p, v16 a) {
    for (int i = 0; i < SIXTEEN; i++) store(p + i * LANES, a.part[i]);
}
inline void store16(bf16* p, v16 a) {
    float x[16];
    for (int i = 0; i < SIXTEEN; i++) store(x + i * LANES, a.part[i]);
    for (int i = 0; i < 16; i++) put(p + i, x[i]);
}

// e^x for x <= 0, 0 below -87: x = n ln 2 + r, a polynomial of degree 6 in r (Cephes' expf), times 2^n. Error: 1 ulp.
inline v16 exp16(v16 x) {
    const vec least = every(-87.0f), turns = every(1.44269504088896341f), magic = every(12582912.0f);
    for (int i = 0; i < SIXTEEN; i++) {
        vec a = x.part[i], held = larger(a, least);
        vec n = fma(held, turns, magic) - magic;
        vec r = fma(n, every(-0.693359375f), held);
        r = fma(n, every(2.12194440e-4f), r);
        vec p = every(1.9875691500e-4f);
        p = fma(p, r, every(1.3981999507e-3f));
        p = fma(p, r, every(8.3334519073e-3f));
        p = fma(p, r, every(4.1665795894e-2f));
        p = fma(p, r, every(1.6666665459e-1f));
        p = fma(p, r, every(5.0000001201e-1f));
        vec y = (fma(p, r * r, r) + every(1.0f)) * power_of_two(n);
#if LANES == 16
        x.part[i] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, least, _CMP_NLT_UQ), y);
        x.part[i] = _mm512_mask_mov_ps(x.part[i], _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
#else
        x.part[i] = _mm256_and_ps(y, _mm256_cmp_ps(a, least, _CMP_NLT_UQ));
        x.part[i] = _mm256_blendv_ps(x.part[i], a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
#endif
    }
    return x;
}

}  // namespace
