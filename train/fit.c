// fit.c -- does a rank's memory fit its device, and what would make it fit. See fit.h.
#include "train/fit.h"
#include <stdio.h>

static size_t total_nbytes(GPTBytes b) {
    return b.params + b.grads + b.optimizer + b.acts;
}

static size_t need(const TrainOptions* opt, GPTConfig c, int rank) {
    GPT g;
    gpt_sizes(&g, c, opt, rank);
    return total_nbytes(gpt_nbytes(&g));
}

// ", -r 3 (123 MiB)"
static void suggest(char* text, size_t nbytes, const char* option, int value, size_t needed) {
    const size_t n = strlen(text);
    (void)snprintf(text + n, nbytes - n, "%s%s %d (%zu MiB)", n ? ", " : "", option, value, needed >> 20);
}

/* Tries one option at a time; of each the value that changes least and fits. A mesh with more ranks needs as
 * many devices more.
 */
static void suggest_all(char* text, size_t nbytes, const TrainOptions* opt, GPTConfig c, size_t nfree) {
    TrainOptions o = *opt;
    size_t n;
    const int trains = !opt->generate && !opt->eval;
    for (o.recompute = opt->recompute + 1; trains && o.recompute <= 3; o.recompute++) {
        if ((n = need(&o, c, 0)) <= nfree) {
            suggest(text, nbytes, "-r", o.recompute, n);
            break;
        }
    }
    o = *opt;
    for (o.batch = opt->batch / 2; o.batch > 0 && o.batch % (opt->up * opt->tp) == 0; o.batch /= 2) {
        if ((n = need(&o, c, 0)) <= nfree) {
            suggest(text, nbytes, "-b", o.batch, n);
            break;
        }
    }
    o = *opt;
    for (o.tp = 2 * opt->tp; o.tp * o.up <= c.NH && o.batch % (o.tp * o.up) == 0 && o.tp <= FO_MAX_RANKS;
         o.tp *= 2) {
        if ((n = need(&o, c, 0)) <= nfree) {
            suggest(text, nbytes, "--tp", o.tp, n);
            break;
        }
    }
    o = *opt;
    for (o.zero = opt->zero + 1; opt->dp * opt->up > 1 && trains && o.zero <= 2; o.zero++) {
        if ((n = need(&o, c, 0)) <= nfree) {
            suggest(text, nbytes, "-z", o.zero, n);
            break;
        }
    }
}

int fit_check(const TrainOptions* opt, GPTConfig c, int rank, size_t nfree, char err[TRAIN_ERR]) {
    char text[TRAIN_ERR / 2] = "";
    GPT g;
    gpt_sizes(&g, c, opt, rank);
    const GPTBytes b = gpt_nbytes(&g);
    if (total_nbytes(b) <= nfree) { return 0; }
    suggest_all(text, sizeof text, opt, c, nfree);
    return train_error(
        err,
        "rank %d needs %zu MiB (parameters %zu, gradients %zu, optimizer %zu, activations %zu), its device "
        "has %zu MiB for it; would fit: %s",
        rank, total_nbytes(b) >> 20, b.params >> 20, b.grads >> 20, b.optimizer >> 20, b.acts >> 20,
        nfree >> 20, text[0] ? text : "a smaller model, or several of -b, -r, --tp and -z together");
}
