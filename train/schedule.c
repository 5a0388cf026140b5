// schedule.c -- the learning rate of a step, in fp32 and in llm.c's order: the same numbers. See schedule.h.
#include "train/schedule.h"
#include <math.h>

// how far step is on the way from `from` to `to`: 0 ... 1
static float ratio_of(int step, int from, int to) {
    if (step >= to) { return 1.0f; }
    return step <= from ? 0.0f : (float)(step - from) / (float)(to - from);
}

float schedule_lr(const Schedule* s, int step) {
    const float low = s->lr * s->final_fraction;
    if (s->kind == SCHEDULE_CONSTANT) { return s->lr; }
    if (step < s->warmup) {
        const float n = (float)(step + 1), warmup = (float)s->warmup;
        return s->kind == SCHEDULE_WSD ? s->lr * (n / warmup) : s->lr * n / warmup; // they round differently
    }
    if (s->kind == SCHEDULE_LINEAR) { return s->lr - ratio_of(step, s->warmup, s->nsteps) * (s->lr - low); }
    if (s->kind == SCHEDULE_COSINE) {
        float ratio = ratio_of(step, s->warmup, s->nsteps);
        return low + 0.5f * (1.0f + cosf((float)(M_PI * (double)ratio))) * (s->lr - low);
    }
    const int decay_from = (int)(0.8f * (float)s->nsteps);
    if (step <= decay_from) { return s->lr; }
    return low + (1.0f - sqrtf(ratio_of(step, decay_from, s->nsteps))) * (s->lr - low);
}
