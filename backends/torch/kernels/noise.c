/* Keyed Gumbel noise on a CPU: `core/noise.py` (threefry, gumbel) for many tokens in one pass, vectorised by the compiler.
 *
 * Compiled when the package is installed, where there is a compiler; without it ops.py uses its numpy reference.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && defined(__linux__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Natural logarithm of a positive normal number, to about 1 unit in the last place: x = 2^e m with m in
 * [sqrt(1/2), sqrt(2)), log m = 2 atanh(s), s = (m - 1) / (m + 1). */
static inline float logarithm(float x) {
    uint32_t bits = as_bits(x);
    int32_t e = (int32_t)(bits - 0x3f3504f3u) >> 23;
    float m = as_float(bits - ((uint32_t)e << 23));
    float s = (m - 1.0f) / (m + 1.0f);
    float z = s * s;
    float p = 0.22222222f * z + 0.28571428f;
    p = p * z + 0.4f;
    p = p * z + 0.66666667f;
    return (float)e * 0.69314718f + (2.0f * s + s * z * p);
}

#define ROUND(r) x0 += x1; x1 = x1 << r | x1 >> (32 - r); x1 ^= x0;
#define ROUNDS_A ROUND(13) ROUND(15) ROUND(26) ROUND(6)
#define ROUNDS_B ROUND(17) ROUND(29) ROUND(16) ROUND(24)
#define KEY(a, b, i) x0 += k##a; x1 += k##b + i;

static inline float gumbel(uint32_t k0, uint32_t k1, uint32_t x0, uint32_t x1) {
    const uint32_t k2 = k0 ^ k1 ^ 0x1BD11BDAu;
    KEY(0, 1, 0u)
    ROUNDS_A KEY(1, 2, 1u) ROUNDS_B KEY(2, 0, 2u) ROUNDS_A KEY(0, 1, 3u) ROUNDS_B KEY(1, 2, 4u) ROUNDS_A KEY(2, 0, 5u)
    float v = (float)x0 * 0x1p-32f + ((float)x1 + 0.5f) * 0x1p-64f;
    float u = (float)~x0 * 0x1p-32f + ((float)~x1 + 0.5f) * 0x1p-64f;
    /* The exponential -log(1-v): from 1-v, formed exactly, in the upper half; in the lower half with the rounding of 1-v
     * taken out again, so that its relative precision holds down to the smallest v. */
    float rest = v < 0.5f ? 1.0f - v : u;
    float lost = 1.0f - rest;
    float exact = v < 0.5f ? v : lost;
    float exponential = lost > 0.0f ? -logarithm(rest) * (exact / lost) : v;
    return -logarithm(exponential);
}

/* out[i] = noise of counter (position, tag | i). */
CLONES
void speclocal_gumbel_row(uint32_t k0, uint32_t k1, uint32_t position, uint32_t tag, uint32_t n, float *out) {
    for (uint32_t i = 0; i < n; i++) out[i] = gumbel(k0, k1, position, tag | i);
}

/* out[i] = noise of counter (position, tag | index[i]). */
CLONES
void speclocal_gumbel_at(
    uint32_t k0, uint32_t k1, uint32_t position, uint32_t tag, uint32_t n, const int64_t *index, float *out) {
    for (uint32_t i = 0; i < n; i++) out[i] = gumbel(k0, k1, position, tag | (uint32_t)index[i]);
}

/* Windows links extension modules by this name; the library is loaded with ctypes. */
void *PyInit__noise(void) { return NULL; }
