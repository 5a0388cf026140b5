// fit.c -- can a mesh cut a model, does a rank's memory fit its device, what would make it fit. See fit.h.
#include "train/fit.h"
#include <stdio.h>

static int nearest_below(int x, int unit) {
    return x / unit * unit > 0 ? x / unit * unit : unit;
}

int check_heads(const TrainOptions* opt, GPTConfig c, char err[TRAIN_ERR]) {
    int tp = opt->tp, up = opt->up, P = up * tp;
    if (P > c.NH && up == 1) {
        return train_error(err,
                           "--tp %d: the model has %d heads, one for each rank at least: --tp %d at most", tp,
                           c.NH, c.NH);
    }
    if (P > c.NH) {
        return train_error(err,
                           "--up %d * --tp %d: the model has %d heads, one for each of their ranks at least: "
                           "%d ranks at most",
                           up, tp, c.NH, c.NH);
    }
    return 0;
}

int check_cuts(const TrainOptions* opt, GPTConfig c, char err[TRAIN_ERR]) {
    int tp = opt->tp, up = opt->up, P = up * tp, B = opt->batch, T = opt->seq_len;
    const int m = overlap_cut(opt->overlap);
    if (T > c.maxT) {
        return train_error(err, "-t %d: the model has positions for %d tokens: -t %d at most", T, c.maxT,
                           c.maxT);
    }
    if (check_heads(opt, c, err)) { return -1; }
    if (up > 1 && T % (2 * P) != 0) {
        return train_error(err, "--up %d: does not cut T=%d tokens into 2*up*tp=%d blocks: try -t %d", up, T,
                           2 * P, nearest_below(T, 2 * P));
    }
    if (B % P != 0 && T % (2 * P) != 0) {
        return train_error(
            err, "--tp %d: cuts neither B=%d sequences nor T=%d tokens into 2*tp blocks: try -b %d or -t %d",
            P, B, T, (B + P - 1) / P * P, nearest_below(T, 2 * P));
    }
    if (tp > 1 && B * T / P % m != 0) {
        return train_error(err, "--overlap %s:%d: a rank's %d tokens (B*T/(up*tp)) are not a multiple of %d",
                           fo_mode_name(opt->overlap.mode), m, B * T / P, m);
    }
    return 0;
}

// ---- memory -----------------------------------------------------------------------------------------------
GPTBytes fit_most(const TrainOptions* opt, GPTConfig c, int* rank) {
    GPTBytes most = {0, 0, 0, 0};
    *rank = 0;
    for (int r = 0; r < opt->dp * opt->up * opt->tp; r++) {
        GPT g;
        gpt_sizes(&g, c, opt, r);
        const GPTBytes b = gpt_nbytes(&g);
        if (total_nbytes(b) > total_nbytes(most)) { most = b, *rank = r; }
    }
    return most;
}

static size_t need(const TrainOptions* opt, GPTConfig c) {
    int rank;
    return total_nbytes(fit_most(opt, c, &rank));
}

// what can be changed, in the order in which it is suggested
typedef enum { RECOMPUTE, BATCH, ZERO, UP, TP, NCHANGES } Change;

static int trains(const TrainOptions* opt) {
    return !opt->generate && !opt->eval;
}

/* change -- the i-th other value, i from 1 on, of one option: those that change least come first. 0: there is
 * none. The number of ranks stays if dp can give way; prompts are dealt out to dp ranks, so there it can't.
 */
static int change(TrainOptions* o, Change what, int i) {
    const int ranks = o->dp * o->up * o->tp;
    switch (what) {
    case RECOMPUTE: o->recompute += i; return trains(o) && o->recompute <= 3;
    case BATCH: o->batch -= i; return o->batch > 0;
    case ZERO: o->zero += i; return trains(o) && o->zero <= 2;
    case UP: o->up += i; break;
    default: o->tp += i;
    }
    const int share = o->up * o->tp;
    if (!o->generate && ranks % share == 0) { o->dp = ranks / share; }
    if (o->generate) { // prompts are padded so that the mesh can cut them
        const int unit = 2 * share * overlap_cut(o->overlap);
        o->seq_len = (o->seq_len + unit - 1) / unit * unit;
    }
    return o->up <= FO_MAX_RANKS && o->tp <= FO_MAX_RANKS;
}

// would the program take these options?
static int possible(const TrainOptions* o, const TrainOptions* opt, GPTConfig c) {
    char why[TRAIN_ERR];
    if (o->dp * o->up * o->tp > FO_MAX_RANKS || (o->zero > opt->zero && o->dp * o->up == 1)) { return 0; }
    if (o->generate) { return check_heads(o, c, why) == 0; }
    const long long tokens = (long long)o->batch * o->seq_len * o->dp;
    return o->total_batch % tokens == 0 && check_cuts(o, c, why) == 0;
}

static int fits(const TrainOptions* o, const TrainOptions* opt, GPTConfig c, size_t nfree) {
    return possible(o, opt, c) && need(o, c) <= nfree;
}

// "; -r 3 --tp 2 (123 MiB, on 2 devices)": what of o is not as in opt
static void suggest(char* text, size_t nbytes, const TrainOptions* o, const TrainOptions* opt, GPTConfig c) {
    const struct {
        const char* name;
        int was, is;
    } rows[] = {{"-r", opt->recompute, o->recompute},
                {"-b", opt->batch, o->batch},
                {"-z", opt->zero, o->zero},
                {"--dp", opt->dp, o->dp},
                {"--up", opt->up, o->up},
                {"--tp", opt->tp, o->tp}};
    const int ranks = o->dp * o->up * o->tp, more = ranks != opt->dp * opt->up * opt->tp;
    char devices[32] = "", changes[128] = "";
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const size_t n = strlen(changes);
        if (rows[i].is == rows[i].was) { continue; }
        (void)snprintf(changes + n, sizeof changes - n, "%s %d ", rows[i].name, rows[i].is);
    }
    if (more) { (void)snprintf(devices, sizeof devices, ", on %d devices", ranks); }
    const size_t n = strlen(text);
    (void)snprintf(text + n, nbytes - n, "%s%s(%zu MiB%s)", n ? "; " : "", changes, need(o, c) >> 20,
                   devices);
}

// each option alone; how many of them are enough
static int suggest_one(char* text, size_t nbytes, const TrainOptions* opt, GPTConfig c, size_t nfree) {
    int found = 0;
    for (int what = 0; what < NCHANGES; what++) {
        TrainOptions o = *opt;
        for (int i = 1; change(&o, (Change)what, i); i++) {
            if (fits(&o, opt, c, nfree)) {
                suggest(text, nbytes, &o, opt, c);
                found++;
                break;
            }
            o = *opt;
        }
    }
    return found;
}

// two options, of each pair the values that change the first least; the first four pairs, for a line has room
// for no more
static int suggest_two(char* text, size_t nbytes, const TrainOptions* opt, GPTConfig c, size_t nfree) {
    enum { MOST = 4 };
    int found = 0;
    for (int one = 0; one < NCHANGES; one++) {
        for (int two = one + 1; two < NCHANGES && found < MOST; two++) {
            TrainOptions first = *opt, o;
            int done = 0;
            for (int i = 1; !done && change(&first, (Change)one, i); i++, first = *opt) {
                o = first;
                for (int k = 1; !done && change(&o, (Change)two, k); k++) {
                    if (fits(&o, opt, c, nfree)) {
                        suggest(text, nbytes, &o, opt, c);
                        done = 1;
                    }
                    o = first;
                }
            }
            found += done;
        }
    }
    return found;
}

// everything that helps, on the mesh that helps most: of equals the one with fewer devices
static TrainOptions smallest(const TrainOptions* opt, GPTConfig c) {
    TrainOptions best = *opt, o = *opt;
    size_t least = need(opt, c);
    if (trains(opt)) { o.recompute = 3; }
    for (int up = 0; up + opt->up <= FO_MAX_RANKS; up++) {
        for (int tp = 0; tp + opt->tp <= FO_MAX_RANKS; tp++) {
            TrainOptions mesh = o;
            if ((up && !change(&mesh, UP, up)) || (tp && !change(&mesh, TP, tp))) { continue; }
            if (trains(opt) && mesh.dp * mesh.up > 1) { mesh.zero = 2; }
            mesh.batch = 1;
            while (mesh.batch < opt->batch && !possible(&mesh, opt, c)) {
                mesh.batch++;
            }
            if (!possible(&mesh, opt, c)) { continue; }
            const size_t n = need(&mesh, c);
            if (n < least) { best = mesh, least = n; }
        }
    }
    return best;
}

int fit_check(const TrainOptions* opt, GPTConfig c, int rank, size_t nfree, char err[TRAIN_ERR]) {
    char text[TRAIN_ERR / 2 + 64] = "";
    const char *says = "would fit: ", *end = "";
    GPT g;
    gpt_sizes(&g, c, opt, rank);
    const GPTBytes b = gpt_nbytes(&g);
    if (total_nbytes(b) <= nfree) { return 0; }
    if (!suggest_one(text, sizeof text, opt, c, nfree) && !suggest_two(text, sizeof text, opt, c, nfree)) {
        const TrainOptions o = smallest(opt, c);
        suggest(text, sizeof text, &o, opt, c);
        if (need(&o, c) > nfree) { says = "even ", end = " is too much: a smaller model or larger devices"; }
    }
    return train_error(
        err,
        "rank %d needs %zu MiB (parameters %zu, gradients %zu, optimizer %zu, activations %zu), its device "
        "has %zu MiB for it; %s%s%s",
        rank, total_nbytes(b) >> 20, b.params >> 20, b.grads >> 20, b.optimizer >> 20, b.acts >> 20,
        nfree >> 20, says, text, end);
}
