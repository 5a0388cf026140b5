/* rng.c -- mt19937 (Matsumoto and Nishimura, 1998) with PyTorch's ways of drawing from it, and xorshift*.
 *
 * The tests (dev/test/test_data.c) compare with numbers that PyTorch printed.
 */
#include "train/rng.h"
#include <math.h>

enum { SHIFT = 397 }; // mt19937 mixes word k with word k + SHIFT

void rng_seed(Rng* rng, uint32_t seed) {
    rng->state[0] = seed;
    for (uint32_t k = 1; k < RNG_N; k++) {
        uint32_t prev = rng->state[k - 1];
        rng->state[k] = 1812433253u * (prev ^ (prev >> 30)) + k;
    }
    rng->next = RNG_N;
    rng->has_spare = 0;
    rng->spare = 0.0;
}

// replaces all 624 words by the next 624
static void refill(Rng* rng) {
    uint32_t* s = rng->state;
    for (int k = 0; k < RNG_N; k++) {
        uint32_t y = (s[k] & 0x80000000u) | (s[(k + 1) % RNG_N] & 0x7fffffffu);
        s[k] = s[(k + SHIFT) % RNG_N] ^ (y >> 1) ^ ((y & 1u) ? 0x9908b0dfu : 0u);
    }
    rng->next = 0;
}

uint32_t rng_u32(Rng* rng) {
    if (rng->next >= RNG_N) { refill(rng); }
    uint32_t y = rng->state[rng->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

float rng_uniform(Rng* rng) {
    return (float)(rng_u32(rng) & 0xffffffu) * (1.0f / 16777216.0f);
}

// uniform in [0, 1), of 53 bits; the first word drawn is the high one
static double uniform53(Rng* rng) {
    uint64_t high = rng_u32(rng);
    uint64_t bits = (high << 32) | rng_u32(rng);
    return (double)(bits & ((1ull << 53) - 1)) * (1.0 / 9007199254740992.0);
}

// a normal value in fp64; every other call uses what the call before left over
static double normal_one(Rng* rng) {
    if (rng->has_spare) {
        rng->has_spare = 0;
        return rng->spare;
    }
    double u1 = uniform53(rng);
    double u2 = uniform53(rng);
    double radius = sqrt(-2.0 * log1p(-u2));
    double angle = 2.0 * M_PI * u1;
    rng->spare = radius * sin(angle);
    rng->has_spare = 1;
    return radius * cos(angle);
}

// Box-Muller: x[16] holds uniforms and becomes 16 normal values, pairs lying 8 apart
static void normal_block(float* x, float mean, float std) {
    for (int t = 0; t < 8; t++) {
        float u1 = 1.0f - x[t]; // in (0, 1], so that the logarithm is finite
        float u2 = x[t + 8];
        float radius = sqrtf(-2.0f * logf(u1));
        float angle = (float)(2.0 * M_PI * (double)u2);
        x[t] = radius * cosf(angle) * std + mean;
        x[t + 8] = radius * sinf(angle) * std + mean;
    }
}

void rng_normal(Rng* rng, float* data, size_t n, float mean, float std) {
    if (n < 16) {
        for (size_t i = 0; i < n; i++) {
            data[i] = (float)(normal_one(rng) * (double)std + (double)mean);
        }
        return;
    }
    for (size_t i = 0; i < n; i++) {
        data[i] = rng_uniform(rng);
    }
    for (size_t i = 0; i + 16 <= n; i += 16) {
        normal_block(data + i, mean, std);
    }
    if (n % 16 != 0) { // the last 16 are drawn anew: some of them were normal already
        float* last = data + n - 16;
        for (int t = 0; t < 16; t++) {
            last[t] = rng_uniform(rng);
        }
        normal_block(last, mean, std);
    }
}

void rng_identity(int* a, size_t n) {
    for (size_t i = 0; i < n; i++) {
        a[i] = (int)i;
    }
}

void rng_permute(Rng* rng, int* a, size_t n) {
    for (size_t i = n; i-- > 1;) {
        size_t j = rng_u32(rng) % (uint32_t)(i + 1);
        int swap = a[i];
        a[i] = a[j];
        a[j] = swap;
    }
}

uint32_t random_u32(uint64_t* state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (uint32_t)((*state * 0x2545F4914F6CDD1Dull) >> 32);
}

float random_f32(uint64_t* state) {
    return (float)(random_u32(state) >> 8) / 16777216.0f;
}
