/* rng.h -- the two generators of a training run, bit for bit those of PyTorch and of llm.c.
 *
 * Rng is PyTorch's CPU generator (mt19937): initial weights and the order of the data are drawn from it, so
 * that a run starts where `torch.manual_seed(seed)` starts. random_u32 is llm.c's xorshift* for sampling
 * text.
 */
#ifndef RNG_H
#define RNG_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define RNG_N 624 // words of state of mt19937

typedef struct {
    uint32_t state[RNG_N];
    uint32_t next;      // word of `state` to be drawn next; RNG_N: make the next 624 first
    uint32_t has_spare; // rng_normal draws in pairs when it fills fewer than 16 values: is one left over?
    double spare;
} Rng;

// as torch.manual_seed(seed) does for a seed below 2^32
void rng_seed(Rng* rng, uint32_t seed);
// 32 random bits
uint32_t rng_u32(Rng* rng);
// uniform in [0, 1), of 24 bits: a float holds it exactly
float rng_uniform(Rng* rng);

/* rng_normal -- fills data[n] with normal values, as torch's tensor.normal_(mean, std) does on the CPU.
 *
 * n >= 16: uniforms everywhere, then Box-Muller in blocks of 16 (the last block anew, when n is not a
 * multiple), in fp32. n < 16: one by one in fp64, the second of a pair kept for the next call. The same
 * numbers as torch's plain loops (ATEN_CPU_CAPABILITY=default); its AVX2 loops differ from them in the last
 * bits.
 */
void rng_normal(Rng* rng, float* data, size_t n, float mean, float std);

// a[n] = 0, 1, ... n-1
void rng_identity(int* a, size_t n);
// shuffles a[n] in place: for i = n-1 ... 1, swaps i with (32 random bits) % (i+1)
void rng_permute(Rng* rng, int* a, size_t n);

// xorshift*; the state must not be 0. random_f32 is uniform in [0, 1).
uint32_t random_u32(uint64_t* state);
float random_f32(uint64_t* state);

#ifdef __cplusplus
}
#endif
#endif
