// sampler.c -- softmax sampling with temperature and top-k. See sampler.h. No memory is allocated.
#include "train/sampler.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

// a whole number that orders floats as they are ordered; a NaN comes first of all
static uint32_t key_of(float f) {
    uint32_t u;
    if (isnan(f)) { return 0; }
    f += 0.0f; // -0 and 0 are equal
    memcpy(&u, &f, sizeof u);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

static int count_from(const float* logits, int V, uint32_t key) {
    int n = 0;
    for (int i = 0; i < V; i++) {
        n += key_of(logits[i]) >= key;
    }
    return n;
}

// the k-th largest key, found bit by bit
static uint32_t kth_key(const float* logits, int V, int k) {
    uint32_t key = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t higher = key | 1u << bit;
        if (count_from(logits, V, higher) >= k) { key = higher; }
    }
    return key;
}

static int argmax(const float* logits, int V) {
    int best = 0;
    for (int i = 1; i < V; i++) {
        if (key_of(logits[i]) > key_of(logits[best])) { best = i; }
    }
    return best;
}

int sampler_draw(const float* logits, int V, float temperature, int top_k, float coin) {
    const int best = argmax(logits, V);
    const double max = (double)logits[best];
    if (temperature <= 0.0f || isnan(logits[best])) { return best; }
    uint32_t key = 1; // everything but NaN
    int nties = V;    // of the tokens whose key is just `key`, how many have a chance
    if (top_k > 0 && top_k < V) {
        key = kth_key(logits, V, top_k);
        key = key > 1 ? key : 1;
        nties = key == UINT32_MAX ? top_k : top_k - count_from(logits, V, key + 1);
    }
    int token = best;
    double sum = 0.0, below = 0.0, wanted = 0.0;
    for (int pass = 0; pass < 2; pass++) { // the sum, then the token
        int left = nties;
        for (int i = 0; i < V; i++) {
            uint32_t k = key_of(logits[i]);
            if (k < key || (k == key && left-- <= 0)) { continue; }
            double d = (double)logits[i] - max;
            double e = d == 0.0 || isnan(d) ? 1.0 : exp(d / (double)temperature); // NaN: both infinite
            if (pass == 0) {
                sum += e;
            } else if (e > 0.0) {
                token = i;
                below += e;
                if (below > wanted) { return token; }
            }
        }
        wanted = (double)coin * sum;
    }
    return token; // for a coin of 1, which none should be: the last token that has a chance
}
