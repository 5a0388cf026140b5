/* test_fit.c -- what is said not to fit does not, and what is said to fit does: the suggestions of refusals,
 * read back as a user would type them, against all the other values that an option can have.
 */
#include "dev/test/check.h"
#include "train/fit.h"
#include <stdlib.h>

enum { R, B, Z, UP, TP, DP, D, NKNOBS };
static const char* const names[NKNOBS] = {"-r", "-b", "-z", "--up", "--tp", "--dp", "-d"};

// a command line: values of the options that memory depends on
typedef struct {
    const char* model;
    int T, value[NKNOBS];
} Line;

// parses it; 0 if the program would refuse it
static int parsed(const Line* line, TrainOptions* o, GPTConfig* c) {
    char text[NKNOBS][16], T[16], err[TRAIN_ERR];
    char* argv[8 + 2 * NKNOBS];
    int argc = 0;
    argv[argc++] = (char*)(size_t) "train_gpt";
    argv[argc++] = (char*)(size_t) "-t";
    (void)snprintf(T, sizeof T, "%d", line->T);
    argv[argc++] = T;
    for (int i = 0; i < NKNOBS; i++) {
        (void)snprintf(text[i], sizeof text[i], "%d", line->value[i]);
        argv[argc++] = (char*)(size_t)names[i];
        argv[argc++] = text[i];
    }
    return options_parse(o, argc, argv, err) == 0 && model_parse(line->model, c, err) == 0 &&
           check_cuts(o, *c, err) == 0;
}

// what the rank that needs most takes; 0 if the program would refuse it
static size_t needs(const Line* line) {
    TrainOptions o;
    GPTConfig c;
    size_t most = 0;
    if (!parsed(line, &o, &c)) { return 0; }
    for (int r = 0; r < o.dp * o.up * o.tp; r++) {
        GPT g;
        gpt_sizes(&g, c, &o, r);
        const GPTBytes b = gpt_nbytes(&g);
        const size_t n = b.params + b.grads + b.optimizer + b.acts;
        if (n > most) { most = n; }
    }
    return most;
}

// the line with another value of one option, the i-th, those that change least first; 0: no more
static int other(Line* line, int knob, int i) {
    const int ranks = line->value[DP] * line->value[UP] * line->value[TP];
    line->value[knob] += knob == B ? -i : i;
    if (knob == UP || knob == TP) {
        const int share = line->value[UP] * line->value[TP];
        if (ranks % share == 0) { line->value[DP] = ranks / share; }
    }
    return line->value[knob] > 0 && line->value[knob] <= (knob == R ? 3 : knob == Z ? 2 : 64);
}

// ZeRO that nothing shares is a value that changes nothing
static int useful(const Line* line, const Line* base) {
    return line->value[Z] == base->value[Z] || line->value[DP] * line->value[UP] > 1;
}

// of one option alone: the value that changes least and fits nfree bytes; 0 if none does
static int best_single(const Line* base, int knob, size_t nfree, Line* best) {
    for (int i = 1;; i++) {
        *best = *base;
        if (!other(best, knob, i)) { return 0; }
        const size_t n = useful(best, base) ? needs(best) : 0;
        if (n > 0 && n <= nfree) { return 1; }
    }
}

static int any_pair(const Line* base, size_t nfree) {
    for (int one = R; one <= TP; one++) {
        Line first = *base, x;
        for (int i = 1; other(&first, one, i); i++, first = *base) {
            for (int two = one + 1; two <= TP; two++) {
                x = first;
                for (int k = 1; other(&x, two, k); k++, x = first) {
                    const size_t n = useful(&x, base) ? needs(&x) : 0;
                    if (n > 0 && n <= nfree) { return 1; }
                }
            }
        }
    }
    return 0;
}

// reads "-r 3 --tp 2 (123 MiB, on 2 devices)" at *text; 0 if there is none. *mib, *devices: as it says
static int read_suggestion(const char** text, const Line* base, Line* line, long* mib, int* devices) {
    char name[16];
    int value, n, nchanges = 0;
    *line = *base;
    while (sscanf(*text, " %15[-a-z] %d%n", name, &value, &n) == 2) {
        int knob = 0;
        while (knob < DP && strcmp(names[knob], name) != 0) {
            knob++;
        }
        CHECK(strcmp(names[knob], name) == 0);
        line->value[knob] = value;
        nchanges += knob != DP;
        *text += n;
    }
    *devices = base->value[DP] * base->value[UP] * base->value[TP];
    if (nchanges == 0 || sscanf(*text, " (%ld MiB%n", mib, &n) != 1) { return 0; }
    *text += n;
    (void)sscanf(*text, ", on %d devices", devices);
    *text += strcspn(*text, ";");
    *text += **text == ';';
    return nchanges;
}

static int same(const Line* a, const Line* b) {
    return memcmp(a->value, b->value, sizeof a->value) == 0;
}

// nfree bytes are refused, and what is suggested is right
static void check_refusal(const Line* base, size_t nfree) {
    char err[TRAIN_ERR] = "";
    TrainOptions o;
    GPTConfig c;
    Line line, best;
    long mib;
    int devices, nchanges, nlines = 0, most = 0, singles = 0, first = 0;
    CHECK(parsed(base, &o, &c));
    CHECK_AT("%s -b %d -d %d, %d * %d * %d, %zu bytes", base->model, base->value[B], base->value[D],
             base->value[DP], base->value[UP], base->value[TP], nfree);
    CHECK(fit_check(&o, c, 0, nfree, err) == -1);
    CHECK(strlen(err) < TRAIN_ERR - 1); // not cut short
    const char* text = strstr(err, "would fit: ");
    const int none = text == NULL;
    text = none ? strstr(err, "; even ") : text;
    CHECK(text != NULL);
    if (!text) { return; }
    text += none ? 7 : 11;
    CHECK(!none || strstr(text, " is too much: a smaller model or larger devices"));
    Line said[8];
    while (nlines < 8 && (nchanges = read_suggestion(&text, base, &line, &mib, &devices)) > 0) {
        const size_t n = needs(&line);
        CHECK(n > 0 && (none ? n > nfree : n <= nfree));
        CHECK((long)(n >> 20) == mib);
        CHECK(devices == line.value[DP] * line.value[UP] * line.value[TP]);
        said[nlines++] = line;
        if (nchanges > most) { most = nchanges; }
    }
    CHECK(nlines > 0);
    for (int knob = R; knob <= TP; knob++) {
        if (!best_single(base, knob, nfree, &best)) { continue; }
        singles++;
        CHECK(first < nlines && same(&said[first], &best)); // in this order, and the least change
        first++;
    }
    CHECK(singles == 0 || (most == 1 && nlines == singles));
    if (singles == 0) {
        const int pairs = any_pair(base, nfree);
        CHECK(pairs ? most == 2 && !none : nlines == 1 && (none || most > 2));
    }
}

static void test_refusals(const Line* base) {
    const size_t all = needs(base);
    TrainOptions o;
    GPTConfig c = {0};
    char err[TRAIN_ERR] = "";
    CHECK_AT("%s fits", base->model);
    CHECK(all > 0 && parsed(base, &o, &c));
    CHECK(fit_check(&o, c, 0, all, err) == 0 && err[0] == 0);
    for (int knob = R; knob <= TP;
         knob++) { // the edges: what is just enough for a value, and just too little
        Line line;
        for (int i = 1; line = *base, other(&line, knob, i); i++) {
            const size_t n = useful(&line, base) ? needs(&line) : 0;
            if (n > 0 && n < all) {
                check_refusal(base, n);
                check_refusal(base, n - 1);
            }
        }
    }
    for (size_t n = all - 1; n > all / 64; n = n * 3 / 4) {
        check_refusal(base, n);
    }
    check_refusal(base, 1000);
}

// the rank that needs most: of heads that can't be cut evenly the last have more than the first, or less
static void test_most(void) {
    const Line uneven = {"L=2,C=200,NH=25,V=1000,maxT=64", 64, {1, 8, 0, 1, 4, 1, 0}};
    TrainOptions o;
    GPTConfig c;
    int rank;
    CHECK_AT("most");
    CHECK(parsed(&uneven, &o, &c));
    const GPTBytes b = fit_most(&o, c, &rank);
    CHECK(rank >= 0 && rank < 4 && total_nbytes(b) == needs(&uneven));
    GPT g;
    size_t least = needs(&uneven);
    for (int r = 0; r < 4; r++) {
        gpt_sizes(&g, c, &o, r);
        const size_t n = total_nbytes(gpt_nbytes(&g));
        least = n < least ? n : least;
        if (r == rank) { CHECK(n == total_nbytes(b)); }
    }
    CHECK(least < needs(&uneven));
}

// who generates has no gradients, and its prompts are dealt out to dp: no -r, -z or other dp is suggested
static void test_generate(void) {
    const char* const args[] = {"train_gpt", "--generate", "-b", "8", "-t", "64", "--dp", "2", "--tp", "1"};
    TrainOptions o;
    GPTConfig c;
    char err[TRAIN_ERR] = "";
    int rank;
    CHECK_AT("generate");
    CHECK(options_parse(&o, 10, (char**)(size_t)args, err) == 0);
    CHECK(model_parse("L=2,C=64,NH=4,V=256,maxT=64", &c, err) == 0);
    const size_t all = total_nbytes(fit_most(&o, c, &rank));
    CHECK(fit_check(&o, c, 0, all, err) == 0);
    CHECK(fit_check(&o, c, 0, all - 1, err) == -1);
    CHECK(strstr(err, "would fit: -b 7 (") && strstr(err, "--tp 2 (") && strstr(err, "on 4 devices"));
    CHECK(!strstr(err, "-r ") && !strstr(err, "-z ") && !strstr(err, "--dp"));
}

int main(void) {
    // values in the order of `names`; the last is -d, of which B*T*dp must be a part
    const Line lines[] = {
        {"L=4,C=64,NH=4,V=256,maxT=64", 64, {0, 12, 0, 1, 1, 1, 768}},
        {"L=4,C=64,NH=4,V=256,maxT=64", 64, {0, 8, 0, 1, 1, 4, 2048}},
        {"L=2,C=96,NH=6,V=20000,maxT=64", 64, {1, 6, 1, 1, 1, 2, 768}},
        {"L=2,C=96,NH=12,V=500,maxT=96", 96, {1, 4, 0, 1, 2, 2, 768}},
        {"L=2,C=50,NH=5,V=3000,maxT=64", 64, {0, 4, 0, 2, 1, 2, 1024}},
        {"L=8,C=64,NH=2,V=256,maxT=1024", 1024, {2, 2, 2, 2, 1, 1, 2048}},
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        test_refusals(&lines[i]);
    }
    test_most();
    test_generate();
    return check_report();
}
