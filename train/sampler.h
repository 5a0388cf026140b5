// sampler.h -- draws the next token from logits. All ranks with the same logits and coin draw the same one.
#ifndef SAMPLER_H
#define SAMPLER_H
#ifdef __cplusplus
extern "C" {
#endif

/* sampler_draw -- the token i for which softmax(logits / temperature)[0 ... i] first exceeds coin.
 *
 * temperature  0: the likeliest token, the first one on a tie, and coin does not matter
 * top_k        only the top_k likeliest tokens have a chance (ties: the first ones); 0 or >= V: all
 * coin         in [0, 1): random_f32 of rng.h
 * Logits that are NaN have no chance; if all are, token 0.
 */
int sampler_draw(const float* logits, // [V], host
                 int V, float temperature, int top_k, float coin);

#ifdef __cplusplus
}
#endif
#endif
