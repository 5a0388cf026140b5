/* test_data.c -- the generators, the dataloader and the tokenizer, against numbers of other programs.
 *
 * Shards are made in a temporary folder. Token i of shard s is 1000*(s+1) + i, so that a batch tells where it
 * is from. Reference numbers come from PyTorch and NumPy, with the command beside each.
 */
#include "data/dataloader.h"
#include "data/tokenizer.h"
#include "dev/test/check.h"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

static char dir[256]; // the temporary folder

// a path in it; valid until the fourth next call
static const char* in_dir(const char* name) {
    static char path[4][512];
    static int k;
    k = (k + 1) % 4;
    snprintf(path[k], sizeof path[k], "%s/%s", dir, name);
    return path[k];
}

static void write_file(const char* name, const void* bytes, size_t nbytes) {
    FILE* f = fopen(in_dir(name), "wb");
    CHECK(f && fwrite(bytes, 1, nbytes, f) == nbytes && fclose(f) == 0);
}

static void write_shard(const char* name, int shard, int ntok, int width) {
    size_t nbytes = 1024 + (size_t)width * (size_t)ntok;
    char* bytes = (char*)calloc(1, nbytes);
    int32_t head[3] = {width == 2 ? 20240520 : 20240801, width == 2 ? 1 : 7, ntok};
    memcpy(bytes, head, sizeof head);
    for (int i = 0; i < ntok; i++) {
        uint32_t token = (uint32_t)(1000 * (shard + 1) + i);
        uint16_t low = (uint16_t)token;
        memcpy(bytes + 1024 + i * width, width == 2 ? (void*)&low : (void*)&token, (size_t)width);
    }
    write_file(name, bytes, nbytes);
    free(bytes);
}

// a loader that opens, or the reason why not among the failures
static DataLoader opened_seed(const char* pattern, int B, int T, int rank, int P, int shuffle, int V,
                              int seed) {
    DataLoader dl;
    char err[DATA_ERR_NBYTES] = "";
    int rc = dataloader_init(&dl, in_dir(pattern), B, T, rank, P, shuffle, seed, V, err);
    if (rc != 0) { fprintf(stderr, "%s\n", err); }
    CHECK(rc == 0);
    return dl;
}

static DataLoader opened(const char* pattern, int B, int T, int rank, int P, int shuffle, int V) {
    return opened_seed(pattern, B, T, rank, P, shuffle, V, 42);
}

// the next batch, poisoned before; 1 if it came
static int next(DataLoader* dl) {
    char err[DATA_ERR_NBYTES] = "";
    for (int i = 0; i < dl->B * dl->T; i++) {
        dl->inputs[i] = dl->targets[i] = -1;
    }
    int rc = dataloader_next_batch(dl, err);
    if (rc != 0) { fprintf(stderr, "%s\n", err); }
    return rc == 0;
}

// ---- generators -------------------------------------------------------------------------------------------
static void test_u32(void) {
    // g = numpy.random.MT19937(); g._legacy_seeding(seed); x = [int(g.random_raw()) for _ in range(1300)]
    // print(x[:4], x[623:626], x[1299])
    static const struct {
        uint32_t seed, first[4], at623[3], at1299;
    } want[] = {
        {42, {1608637542, 3421126067, 4083286876, 787846414}, {1077437785, 108880612, 791707097}, 2059789457},
        {43,
         {494155588, 2134003008, 2615920895, 442015537},
         {1077510982, 1322760595, 1315836958},
         4048637436},
        {1337,
         {1125387415, 2407456957, 681542492, 913057000},
         {1300211528, 805945116, 2006794700},
         2494007588},
    };
    for (size_t k = 0; k < sizeof want / sizeof *want; k++) {
        CHECK_AT("seed %u", want[k].seed);
        Rng rng;
        rng_seed(&rng, want[k].seed);
        uint32_t x[1300];
        for (int i = 0; i < 1300; i++) {
            x[i] = rng_u32(&rng);
        }
        CHECK_BITS(x, want[k].first, sizeof want[k].first);
        CHECK_BITS(x + 623, want[k].at623, sizeof want[k].at623);
        CHECK(x[1299] == want[k].at1299);
    }
    // state ^= state>>12; state ^= state<<25; state ^= state>>27; state * 0x2545F4914F6CDD1D >> 32, in Python
    static const uint32_t want_xorshift[4] = {989205090, 818269915, 1335155955, 3876892996};
    uint64_t a = 1337, b = 1337;
    for (int i = 0; i < 4; i++) {
        CHECK(random_u32(&a) == want_xorshift[i]);
        CHECK(random_f32(&b) == (float)(want_xorshift[i] >> 8) / 16777216.0f);
    }
}

static void test_normal(void) {
    // ATEN_CPU_CAPABILITY=default python3 -c "import torch
    // torch.manual_seed(42); a = torch.empty(40).normal_(0, 0.02); b = torch.empty(5).normal_(0, 0.02)
    // c = torch.empty(4).normal_(1, 2); print([float(x).hex() for t in (a, b, c) for x in t])
    // print([x * 2**24 for x in torch.rand(3).tolist()])"
    static const float want_a[40] = {
        0x1.3bb4acp-5,   0x1.e75a70p-6,  0x1.2725a2p-6,  -0x1.58f7f8p-5, 0x1.bc9bbap-7,  -0x1.948924p-6,
        -0x1.c39864p-11, -0x1.06e89cp-5, -0x1.eceb82p-7, 0x1.0e2072p-5,  -0x1.0136fep-7, -0x1.cbef0ep-6,
        -0x1.dd0636p-7,  -0x1.6ea0c2p-7, -0x1.f7ddc4p-7, 0x1.f3ad1cp-7,  0x1.0d13c4p-5,  -0x1.a25ff2p-9,
        -0x1.45f972p-7,  0x1.2016d6p-7,  -0x1.f0d94cp-7, 0x1.6157d6p-6,  0x1.066804p-6,  0x1.135a56p-5,
        0x1.6e134ap-11,  0x1.a4e052p-8,  0x1.01d192p-5,  -0x1.150af4p-6, 0x1.ae0456p-6,  0x1.c25638p-7,
        -0x1.64e6a6p-6,  -0x1.d1ae66p-8, -0x1.d0ab7cp-6, 0x1.25b06ep-6,  0x1.05a5dep-10, 0x1.73610ap-5,
        0x1.82518ep-6,   -0x1.1cb96ap-7, -0x1.c648c4p-6, -0x1.a57794p-6};
    static const float want_b[5] = {-0x1.05a324p-10, 0x1.58f0b0p-7, -0x1.64776cp-13, 0x1.ddcc14p-7,
                                    0x1.5d0610p-9};
    static const float want_c[4] = {0x1.5d2da4p+1, -0x1.080686p+0, -0x1.8e1418p-1, 0x1.4cafeep+0};
    static const float want_u[3] = {2745683.0f, 11786331.0f, 11392366.0f};
    CHECK_AT("normal values");
    float a[41], b[5], c[4];
    for (int i = 0; i < 41; i++) {
        a[i] = NAN;
    }
    Rng rng;
    rng_seed(&rng, 42);
    rng_normal(&rng, a, 40, 0.0f, 0.02f); // two blocks of 16, and the last 16 anew
    rng_normal(&rng, b, 5, 0.0f, 0.02f);  // leaves one over, which the next call begins with
    rng_normal(&rng, c, 4, 1.0f, 2.0f);
    // equal to the bit with the C library that PyTorch used; another's logf, cosf and sinf may be an ulp off,
    // each of which is 2^-24 of a value, and the angle's ulp (up to 2^-22) goes into the cosine
    CHECK_CLOSE(a, want_a, 40, 4e-7);
    CHECK_CLOSE(b, want_b, 5, 1e-7);
    CHECK_CLOSE(c, want_c, 4, 1e-7);
    CHECK(isnan(a[40]));
    for (int i = 0; i < 3; i++) { // the generator stands where PyTorch's stands
        CHECK(rng_uniform(&rng) * 16777216.0f == want_u[i]);
    }
}

// ---- order ------------------------------------------------------------------------------------------------
enum { B = 2, T = 4, NSHARDS = 3 };

static void test_sequential(int P) {
    static const int ntok[NSHARDS] = {203, 101, 164};
    for (int s = 0; s < NSHARDS; s++) {
        char name[32];
        snprintf(name, sizeof name, "seq_%06d.bin", s);
        write_shard(name, s, ntok[s], s == 1 ? 4 : 2); // the widths may be mixed
    }
    DataLoader dl[4];
    for (int r = 0; r < P; r++) {
        dl[r] = opened("seq_*.bin", B, T, r, P, 0, 50257);
        CHECK(dl[r].nshards == NSHARDS && dl[r].ntok == 203 + 101 + 164);
        CHECK(dataloader_samples(&dl[r]) ==
              (size_t)(202 / (P * B * T) + 100 / (P * B * T) + 163 / (P * B * T)));
    }
    // two epochs: the ranks' batches side by side are each shard in order, without its tail
    for (int epoch = 0; epoch < 2; epoch++) {
        for (int s = 0; s < NSHARDS; s++) {
            int samples = (ntok[s] - 1) / (P * B * T), expected = 1000 * (s + 1), wrong = 0;
            for (int k = 0; k < samples; k++) {
                for (int r = 0; r < P; r++) {
                    wrong += !next(&dl[r]);
                    for (int i = 0; i < B * T; i++, expected++) {
                        wrong += dl[r].inputs[i] != expected || dl[r].targets[i] != expected + 1;
                    }
                }
            }
            CHECK_AT("P=%d epoch %d shard %d", P, epoch, s);
            CHECK(wrong == 0 && samples > 0);
        }
    }
    char err[DATA_ERR_NBYTES];
    for (int r = 0; r < P; r++) {
        CHECK(next(&dl[r]) && next(&dl[r]));
        CHECK(dataloader_reset(&dl[r], err) == 0 && next(&dl[r]) && dl[r].inputs[0] == 1000 + r * B * T);
        dataloader_free(&dl[r]);
    }
}

/* The order of llm.c, by another generator and another language:
 *   g = numpy.random.MT19937(); g._legacy_seeding(42 + rank); shards = [0, 1, 2]; nsamp = [5, 3, 4]
 *   def shuffle(a):
 *       for i in range(len(a) - 1, 0, -1):
 *           j = int(g.random_raw()) % (i + 1); a[i], a[j] = a[j], a[i]
 *   for epoch in range(2):
 *       shuffle(shards)
 *       for s in shards: a = list(range(nsamp[s])); shuffle(a); print([100 * s + k for k in a])
 */
static const int shuffled[2][24] = {
    {202, 203, 201, 200, 101, 100, 102, 1, 0, 3, 2, 4, 0, 2, 1, 3, 4, 201, 202, 200, 203, 102, 100, 101},
    {200, 202, 201, 203, 2, 1, 3, 4, 0, 100, 102, 101, 100, 102, 101, 203, 201, 202, 200, 2, 4, 0, 3, 1}};

static void write_shuffled_shards(void) {
    static const int nsamp[NSHARDS] = {5, 3, 4};
    for (int s = 0; s < NSHARDS; s++) {
        char name[32];
        snprintf(name, sizeof name, "mix_%06d.bin", s);
        write_shard(name, s, nsamp[s] * 2 * B * T + 1 + s, 2); // with a tail of s tokens
    }
}

static void check_order(int rank, int seed, const int order[24]) {
    DataLoader dl = opened_seed("mix_*.bin", B, T, rank, 2, 1, 50257, seed);
    int wrong = 0;
    for (int k = 0; k < 24; k++) {
        wrong += !next(&dl);
        int shard = order[k] / 100, sample = order[k] % 100;
        int first = 1000 * (shard + 1) + sample * 2 * B * T + rank * B * T;
        for (int i = 0; i < B * T; i++) {
            wrong += dl.inputs[i] != first + i || dl.targets[i] != first + i + 1;
        }
    }
    CHECK(wrong == 0);
    dataloader_free(&dl);
}

static void test_shuffled(void) {
    for (int k = 0; k < 4; k++) { // the order of a rank is that of its sum with the seed
        const int r = k % 2, rank = k < 2 ? r : 1 - r, seed = 42 + r - rank;
        CHECK_AT("rank %d, seed %d", rank, seed);
        check_order(rank, seed, shuffled[r]);
    }
}

// ---- position ---------------------------------------------------------------------------------------------
enum { LONG = 60 }; // batches: four epochs and a half of 13

static DataLoader opened_four(int rank, int P, int shuffle) {
    return opened("four_*.bin", B, T, rank, P, shuffle, 50257);
}

// Stopped after each number of batches, at the ends of shards and epochs too, every process goes on as if it
// had not been, whichever process' position was saved.
static void test_resume(int P, int shuffle) {
    static const int nsamp[4] = {5, 3, 4, 1};
    int first[4][LONG + 16]; // token of each process' batches
    char err[DATA_ERR_NBYTES];
    for (int s = 0; s < 4; s++) {
        char name[32];
        snprintf(name, sizeof name, "four_%06d.bin", s);
        write_shard(name, s, nsamp[s] * P * B * T + 1 + s, 2);
    }
    for (int r = 0; r < P; r++) {
        DataLoader dl = opened_four(r, P, shuffle);
        for (int k = 0; k < LONG + 16; k++) {
            CHECK(next(&dl));
            first[r][k] = dl.inputs[0];
        }
        dataloader_free(&dl);
    }
    for (int saver = 0; saver<P; saver += P> 1 ? P - 1 : 1) {
        DataLoader a = opened_four(saver, P, shuffle);
        for (int stop = 0; stop <= LONG; stop++) {
            unsigned char state[DATA_STATE_NBYTES];
            memset(state, 0xff, sizeof state);
            dataloader_save(&a, state);
            CHECK_AT("P=%d shuffle %d, stopped after %d, saved by %d", P, shuffle, stop, saver);
            for (int r = 0; r < P; r++) {
                DataLoader b = opened_four(r, P, shuffle);
                int wrong = !next(&b); // stands elsewhere
                strcpy(err, "not touched");
                wrong += dataloader_restore(&b, state, sizeof state, err) != 0 || err[0] != 0;
                for (int k = 0; k < 16; k++) {
                    wrong += !next(&b) || b.inputs[0] != first[r][stop + k];
                    wrong += b.targets[B * T - 1] != first[r][stop + k] + B * T;
                }
                CHECK(wrong == 0);
                dataloader_free(&b);
            }
            CHECK(next(&a));
        }
        dataloader_free(&a);
    }
}

// another B*T*processes: as many tokens into the shard, rounded down to a sample, and a note
static void test_resume_reshaped(void) {
    uint64_t state[DATA_STATE_NBYTES / 8];
    char err[DATA_ERR_NBYTES];
    CHECK_AT("another shape");
    write_shard("wide_0.bin", 0, 200, 2);
    write_shard("wide_1.bin", 1, 200, 2);
    DataLoader a = opened("wide_*.bin", B, T, 0, 1, 0, 50257); // 24 samples of 8 tokens a shard
    for (int k = 0; k < 24 + 7; k++) {
        next(&a);
    }
    dataloader_save(&a, state); // 56 tokens into the second shard
    DataLoader b = opened("wide_*.bin", 3, T, 1, 2, 0, 50257);
    CHECK(dataloader_restore(&b, state, sizeof state, err) == 0);
    CHECK(strcmp(err, "a step's batch was 8 tokens and is 24: the data go on at token 48 of the shard") == 0);
    CHECK(next(&b) && b.inputs[0] == 2000 + 48 + 12);
    dataloader_free(&b);
    b = opened("wide_*.bin", 1, T, 1, 2, 0, 50257); // the same number of tokens, in two parts
    CHECK(dataloader_restore(&b, state, sizeof state, err) == 0 && err[0] == 0);
    CHECK(next(&b) && b.inputs[0] == 2000 + 56 + 4);
    dataloader_free(&b);
    b = opened("wide_*.bin", 45, T, 0, 1, 0, 50257); // one sample of 180 tokens a shard: its only one
    CHECK(dataloader_restore(&b, state, sizeof state, err) == 0 && next(&b) && b.inputs[0] == 2000);
    for (int k = 24 + 7; k < 48; k++) {
        next(&a);
    }
    dataloader_save(&a, state); // 192 tokens: the shard's end
    CHECK(dataloader_restore(&b, state, sizeof state, err) == 0 && next(&b) && b.inputs[0] == 1000);
    dataloader_free(&b);
    dataloader_free(&a);
    // shuffled, the processes have read the same number of batches: their epochs end together
    a = opened("mix_*.bin", B, T, 0, 1, 1, 50257);
    for (int k = 0; k < 24 + 17; k++) {
        next(&a);
    }
    dataloader_save(&a, state);
    CHECK(a.epoch == 1);
    int left[3] = {0};
    for (int r = 0; r < 3; r++) {
        b = opened("mix_*.bin", 1, T, r, 3, 1, 50257);
        CHECK(dataloader_restore(&b, state, sizeof state, err) == 0 && b.epoch == 1);
        CHECK(strstr(err, "was 8 tokens and is 12") != NULL);
        while (b.epoch == 1 && left[r] < 100) {
            left[r] += next(&b);
        }
        dataloader_free(&b);
    }
    CHECK(left[0] > 1 && left[0] == left[1] && left[0] == left[2]);
    dataloader_free(&a);
}

// restores must fail with `text` and leave the loader where it stands
static void check_refused(DataLoader* dl, const void* state, size_t nbytes, const char* text) {
    char err[DATA_ERR_NBYTES] = "", before[DATA_STATE_NBYTES], after[DATA_STATE_NBYTES];
    dataloader_save(dl, before);
    CHECK_AT("%s", text);
    CHECK(dataloader_restore(dl, state, nbytes, err) == -1);
    if (!strstr(err, text)) { fprintf(stderr, "wanted '%s', got '%s'\n", text, err); }
    CHECK(strstr(err, text) != NULL && !strchr(err, '\n'));
    dataloader_save(dl, after);
    CHECK_BITS(after, before, sizeof before);
}

static void test_resume_errors(void) {
    DataLoader dl = opened("mix_*.bin", B, T, 1, 2, 1, 50257);
    uint64_t f[DATA_STATE_NBYTES / 8];
    char err[DATA_ERR_NBYTES];
    next(&dl);
    dataloader_save(&dl, f);
    check_refused(&dl, f, 7, "damaged: 7 bytes, want 88");
    static const struct {
        int field;
        uint64_t value;
        const char* text;
    } bad[] = {{0, 9, "another version: 9, not 3"},
               {1, 0, "another shuffle: 0, not 1"},
               {2, 9, "another number of shards: 9, not 3"},
               {3, 9, "another number of tokens: 9, not"},
               {4, 0, "damaged"},
               {4, ~0ull, "damaged"},
               {5, 0, "damaged"},
               {6, 1ull << 40, "damaged"},
               {7, 1ull << 40, "damaged"},
               {7, 1ull << 30, "damaged: epoch 1073741824"}, // each would be shuffled again
               {8, 3, "damaged: epoch 0, shard 3 of 3, sample 1 of 16 tokens"},
               {9, 100, "damaged"},
               {9, 1ull << 60, "damaged"},
               {10, 43, "another seed: 43, not 42"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const uint64_t keep = f[bad[i].field];
        f[bad[i].field] = bad[i].value;
        check_refused(&dl, f, sizeof f, bad[i].text);
        f[bad[i].field] = keep;
    }
    f[0] = 2; // of the time before seeds could be chosen
    CHECK(dataloader_restore(&dl, f, 80, err) == 0 && err[0] == 0 && dl.current_sample_idx == 1);
    f[0] = 3;
    CHECK_AT("a rank that no run has had"); // its generator's seed goes beyond an int
    const uint64_t rank = f[6];
    f[6] = INT32_MAX;
    CHECK(dataloader_restore(&dl, f, sizeof f, err) == 0 && next(&dl));
    f[6] = rank;
    CHECK_AT("a shard that went away");
    CHECK(rename(in_dir("mix_000000.bin"), in_dir("gone.bin")) == 0);
    for (f[8] = 0; f[8] < 3 && dataloader_restore(&dl, f, sizeof f, err) == 0;) {
        f[8]++;
    }
    CHECK(f[8] < 3 && strstr(err, "can't open") && strstr(err, "mix_000000.bin"));
    CHECK(rename(in_dir("gone.bin"), in_dir("mix_000000.bin")) == 0);
    CHECK(dataloader_seek(&dl, 0, 0, 3, 0, err) == -1 && strstr(err, "no shard 3 in the order of 3"));
    CHECK(dataloader_seek(&dl, 1, 0, 0, 0, err) == 0 && next(&dl) && dl.inputs[0] == 3000 + B * T);
    dataloader_free(&dl);
}

// A token beyond the 2^31st byte, in a sparse file of 4.2 GB; the position is set through the saved state, as
// doc/formats.md lays it out.
static void test_large(void) {
    enum { NTOK = 2100000000, BIG = 1000 };
    write_shard("large.bin", 0, BIG * BIG + 1, 2);
    int fd = open(in_dir("large.bin"), O_RDWR);
    int32_t ntok = NTOK;
    uint16_t last[3] = {7, 8, 9};
    off_t nbytes = 1024 + 2 * (off_t)NTOK;
    CHECK(pwrite(fd, &ntok, 4, 8) == 4 && ftruncate(fd, nbytes) == 0);
    CHECK(pwrite(fd, last, sizeof last, nbytes - (off_t)sizeof last) == (ssize_t)sizeof last);
    close(fd);
    CHECK_AT("large file");
    DataLoader dl = opened("large.bin", BIG, BIG, 0, 1, 0, 50257);
    // 2099 samples of 10^6 tokens, the tail dropped: put the end of the last sample to the end of the file
    CHECK(dl.shard_num_samples == 2099 && dl.ntok == NTOK);
    dataloader_free(&dl);
    dl = opened("large.bin", 1, 2, 0, 1, 0, 50257);
    uint64_t f[DATA_STATE_NBYTES / 8];
    char err[DATA_ERR_NBYTES];
    CHECK(dl.shard_num_samples == (NTOK - 1) / 2);
    dataloader_save(&dl, f);
    f[9] = dl.shard_num_samples - 1; // its two inputs and the target are tokens NTOK-4, -3 and -2
    CHECK(dataloader_restore(&dl, f, sizeof f, err) == 0 && next(&dl));
    CHECK(dl.inputs[0] == 0 && dl.inputs[1] == 7 && dl.targets[0] == 7 && dl.targets[1] == 8);
    dataloader_free(&dl);
    unlink(in_dir("large.bin"));
}

// ---- errors -----------------------------------------------------------------------------------------------
// one line that holds both texts
static void check_said(int rc, const char* err, const char* text, const char* more) {
    CHECK_AT("%s", text);
    if (!strstr(err, text) || !strstr(err, more)) {
        fprintf(stderr, "wanted '%s' and '%s', got '%s'\n", text, more, err);
    }
    CHECK(rc == -1 && strstr(err, text) && strstr(err, more) && !strchr(err, '\n'));
}

static void check_init_fails(const char* pattern, int b, int t, int P, const char* text, const char* more) {
    DataLoader dl;
    char err[DATA_ERR_NBYTES] = "";
    int rc = dataloader_init(&dl, in_dir(pattern), b, t, 0, P, 1, 42, 50257, err);
    check_said(rc, err, text, more);
    DataLoader empty;
    memset(&empty, 0, sizeof empty);
    CHECK_BITS(&dl, &empty, sizeof empty);
}

// a shard's header, `extra` bytes after it
static void write_header(const char* name, int magic, int version, int ntok, size_t nbytes) {
    int32_t file[1024] = {magic, version, ntok};
    write_file(name, file, nbytes);
}

static void test_shard_errors(void) {
    check_init_fails("none_*.bin", 1, 1, 1, "no file matches", "none_*.bin");
    write_file("empty.bin", "", 0);
    check_init_fails("empty.bin", 1, 1, 1, "empty.bin is empty", "0 bytes");
    mkdir(in_dir("folder.bin"), 0700);
    check_init_fails("folder.bin", 1, 1, 1, "folder.bin: it is not a regular file", "");
    CHECK(mkfifo(in_dir("pipe.bin"), 0600) == 0); // nobody writes into it: not waited for
    check_init_fails("pipe.bin", 1, 1, 1, "pipe.bin: it is not a regular file", "");
    write_file("new\nline\x1b[2J.bin", "", 0); // a name that would break the line
    check_init_fails("new*", 1, 1, 1, "new?line?[2J.bin is empty", "0 bytes");
    write_file("tiny.bin", "\x01\x02", 2);
    check_init_fails("tiny.bin", 1, 1, 1, "tiny.bin has 2 bytes", "1024");
    write_header("cut.bin", 20240520, 1, 100, 600);
    check_init_fails("cut.bin", 1, 1, 1, "cut.bin has 600 bytes", "truncated");
    write_file("page.bin", "\n<!DOCTYPE html><html>", 22);
    check_init_fails("page.bin", 1, 1, 1, "an HTML page", "not a token shard");
    write_header("model.bin", 20240326, 3, 1024, 1124);
    check_init_fails("model.bin", 1, 1, 1, "is a model checkpoint", "not a token shard");
    write_header("tok.bin", 20240328, 2, 256, 1124);
    check_init_fails("tok.bin", 1, 1, 1, "is a tokenizer", "not a token shard");
    write_file("lfs.bin", "version https://git-lfs.github.com/spec/v1\n", 43);
    check_init_fails("lfs.bin", 1, 1, 1, "Git LFS pointer", "git lfs pull");
    write_file("text.bin", "To be, or not to be", 19);
    check_init_fails("text.bin", 1, 1, 1, "looks like text", "data/prepare.py");
    write_header("magic.bin", 123456, 1, 50, 1124);
    check_init_fails("magic.bin", 1, 1, 1, "starts with 123456", "20240520");
    write_header("swap.bin", (int)__builtin_bswap32(20240520), 1, 50, 1124);
    check_init_fails("swap.bin", 1, 1, 1, "big endian", "20240520");
    write_header("version.bin", 20240520, 7, 50, 1124);
    check_init_fails("version.bin", 1, 1, 1, "has version 7", "only version 1");
    write_header("version32.bin", 20240801, 1, 50, 1224);
    check_init_fails("version32.bin", 1, 1, 1, "has version 1", "only version 7");
    write_header("negative.bin", 20240520, 1, -50, 1124);
    check_init_fails("negative.bin", 1, 1, 1, "-50 tokens", "header");
    write_header("size.bin", 20240520, 1, 51, 1124);
    check_init_fails("size.bin", 1, 1, 1, "has 1124 bytes", "1024 + 2*51 = 1126");
    write_header("long.bin", 20240520, 1, 49, 1124);
    check_init_fails("long.bin", 1, 1, 1, "has 1124 bytes", "1024 + 2*49 = 1122");
    write_header("size32.bin", 20240801, 7, 50, 1124);
    check_init_fails("size32.bin", 1, 1, 1, "has 1124 bytes", "1024 + 4*50 = 1224");
    // the second of two is wrong: found at open, not an epoch later
    write_shard("pair_0.bin", 0, 50, 2);
    write_header("pair_1.bin", 20240520, 1, 51, 1124);
    check_init_fails("pair_?.bin", 1, 1, 1, "pair_1.bin has 1124 bytes", "1126");
}

static void test_other_errors(void) {
    DataLoader dl;
    char err[DATA_ERR_NBYTES] = "";
    write_shard("short.bin", 0, 100, 2);
    check_init_fails("short.bin", 5, 10, 2, "has 100 tokens, but B=5 * T=10 * 2 processes + 1 = 101",
                     "B=4 works");
    check_init_fails("short.bin", 1, 50, 2, "+ 1 = 101 are needed", "B=1 T=49 works");
    check_init_fails("short.bin", 1, 1, 100, "+ 1 = 101 are needed", "join it");
    dl = opened("short.bin", 4, 10, 1, 2, 1, 50257); // what it says works
    dataloader_free(&dl);
    dl = opened("short.bin", 1, 49, 1, 2, 1, 50257);
    dataloader_free(&dl);
    check_init_fails("short.bin", 0, 10, 2, "B=0", "T=10");
    int rc = dataloader_init(&dl, in_dir("short.bin"), 1, 1, 2, 2, 0, 42, 50257, err);
    check_said(rc, err, "process 2 of 2", "");

    // tokens 1000 ... 1099: the last one that a batch of 3 x 10 reads is 1090, as a target
    dl = opened("short.bin", 1, 30, 0, 1, 0, 1090);
    CHECK(next(&dl) && next(&dl));
    rc = dataloader_next_batch(&dl, err);
    check_said(rc, err, "token 1090 at position 90 of", "V=1090");
    CHECK(strstr(err, "short.bin") != NULL);
    dataloader_free(&dl);
    dl = opened("short.bin", 1, 30, 0, 1, 0, 1091);
    CHECK(next(&dl) && next(&dl) && next(&dl));
    CHECK(truncate(in_dir("short.bin"), 1030) == 0); // under the loader's hands
    rc = dataloader_next_batch(&dl, err);
    check_said(rc, err, "can't read 31 tokens at position", "shorter");
    CHECK(unlink(in_dir("short.bin")) == 0);
    rc = dataloader_reset(&dl, err);
    check_said(rc, err, "can't open", "short.bin");
    dataloader_free(&dl);

    char longest[512]; // the message says what is wrong, and the end of the name
    snprintf(longest, sizeof longest, "%s/%0200d.bin", dir, 7);
    rc = dataloader_init(&dl, longest, 1, 1, 0, 1, 0, 42, 50257, err);
    check_said(rc, err, "no file matches", "7.bin'");
}

// ---- tokenizer --------------------------------------------------------------------------------------------
// writes V tokens, token i being 1 + i % 255 bytes of value i; returns the number of bytes
static size_t write_tokenizer(const char* name, uint32_t magic, uint32_t version, uint32_t V, uint32_t eot) {
    size_t nbytes = 1024;
    unsigned char* file = (unsigned char*)calloc(1, 1024 + (size_t)V * 256);
    uint32_t head[4] = {magic, version, V, version == 2 ? eot : 0};
    memcpy(file, head, sizeof head);
    for (uint32_t i = 0; i < V; i++) {
        size_t n = 1 + i % 255;
        file[nbytes++] = (unsigned char)n;
        memset(file + nbytes, (int)(i & 255), n);
        nbytes += n;
    }
    write_file(name, file, nbytes);
    free(file);
    return nbytes;
}

static void test_tokenizer(void) {
    Tokenizer tk;
    char err[DATA_ERR_NBYTES] = "";
    for (uint32_t version = 1; version <= 2; version++) {
        CHECK_AT("version %u", version);
        write_tokenizer("t.bin", 20240328, version, 50257, 11);
        CHECK(tokenizer_init(&tk, in_dir("t.bin"), err) == 0);
        CHECK(tk.V == 50257 && tk.eot == (version == 1 ? 50256 : 11));
        int wrong = 0;
        for (int i = 0; i < tk.V; i++) {
            size_t n = 0;
            const char* p = tokenizer_decode(&tk, i, &n);
            wrong += !p || n != (size_t)(1 + i % 255) || (unsigned char)p[0] != (i & 255) || p[n - 1] != p[0];
        }
        CHECK(wrong == 0);
        size_t n = 5;
        CHECK(tokenizer_decode(&tk, 50257, &n) == NULL && n == 0);
        CHECK(tokenizer_decode(&tk, -1, &n) == NULL);
        tokenizer_free(&tk);
        CHECK(tokenizer_decode(&tk, 0, &n) == NULL);
    }
}

static void test_encode(void) {
    char file[1024 + 32] = {0};
    uint32_t head[4] = {20240328, 2, 8, 0};
    memcpy(file, head, sizeof head);
    memcpy(file + 1024, "\1a\1b\1c\2ab\2bc\3abc\2aa\1d", 21);
    write_file("e.bin", file, 1024 + 21);
    static const struct {
        const char* text;
        int most, n, id[5];
    } want[] = {
        {"", 9, 0, {0}},
        {"abc", 9, 1, {5}},            // ab before bc, since it is the older merge; then the two
        {"bcab", 9, 2, {4, 3}},        // two merges that do not touch
        {"aaa", 9, 2, {6, 0}},         // of two equal ones the first
        {"dcaab", 9, 4, {7, 2, 0, 3}}, // ab is older than aa
        {"dcaab", 2, 2, {7, 2}},       // cut
        {"abx", 9, -1, {0}},           // x has no token
    };
    Tokenizer tk;
    char err[DATA_ERR_NBYTES] = "";
    CHECK(tokenizer_init(&tk, in_dir("e.bin"), err) == 0);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        int ids[9] = {-7, -7, -7, -7, -7, -7, -7, -7, -7};
        CHECK_AT("'%s' to at most %d tokens", want[i].text, want[i].most);
        int n = tokenizer_encode(&tk, want[i].text, ids, want[i].most);
        CHECK(n == want[i].n && ids[n < 0 ? 0 : n] == -7);
        CHECK_BITS(ids, want[i].id, (size_t)(n < 0 ? 0 : n) * sizeof(int));
    }
    tokenizer_free(&tk);
}

static void test_print(void) {
    char file[1024 + 16] = {0};
    uint32_t head[4] = {20240328, 2, 5, 0};
    memcpy(file, head, sizeof head);
    // A, a bell, a newline, a bell and more, half a letter
    memcpy(file + 1024, "\1A\1\a\1\n\3\abc\1\x80", 12);
    write_file("p.bin", file, 1024 + 12);
    Tokenizer tk;
    char err[DATA_ERR_NBYTES] = "", got[64] = {0};
    CHECK(tokenizer_init(&tk, in_dir("p.bin"), err) == 0);
    FILE* out = fopen(in_dir("printed"), "w+b");
    for (int i = 0; i <= 5; i++) {
        tokenizer_print(&tk, i, out);
    }
    tokenizer_free(&tk);
    tokenizer_print(&tk, 3, out);
    rewind(out);
    size_t n = fread(got, 1, sizeof got - 1, out);
    fclose(out);
    CHECK(n == 10 && strcmp(got, "A\n\abc\x80"
                                 "5 3 ") == 0);
}

static void check_tokenizer_fails(const char* name, const char* text, const char* more) {
    Tokenizer tk;
    char err[DATA_ERR_NBYTES] = "";
    int rc = tokenizer_init(&tk, in_dir(name), err);
    check_said(rc, err, text, more);
    CHECK(tk.V == 0 && tk.bytes == NULL && tk.offset == NULL);
}

static void test_tokenizer_errors(void) {
    check_tokenizer_fails("nowhere.bin", "can't open", "No such file");
    check_tokenizer_fails("empty.bin", "empty.bin is not a tokenizer", "0 bytes");
    check_tokenizer_fails("folder.bin", "not a regular file", "");
    check_tokenizer_fails("pipe.bin", "not a regular file", "");
    write_file("huge.bin", "", 0); // as much memory would be taken
    CHECK(truncate(in_dir("huge.bin"), (off_t)1 << 32) == 0);
    check_tokenizer_fails("huge.bin", "huge.bin is not a tokenizer", "too large");
    check_tokenizer_fails("page.bin", "an HTML page", "not a tokenizer");
    check_tokenizer_fails("seq_000000.bin", "is a token shard", "not a tokenizer");
    check_tokenizer_fails("tiny.bin", "has 2 bytes", "1024");
    check_tokenizer_fails("magic.bin", "starts with 123456", "20240328");
    write_tokenizer("t.bin", __builtin_bswap32(20240328), 2, 300, 11);
    check_tokenizer_fails("t.bin", "big endian", "");
    write_tokenizer("t.bin", 20240328, 3, 300, 11);
    check_tokenizer_fails("t.bin", "has version 3", "1 and 2");
    write_tokenizer("t.bin", 20240328, 2, 300, 300);
    check_tokenizer_fails("t.bin", "has 300 tokens, of which 300 ends", "");
    write_tokenizer("t.bin", 20240328, 1, 300, 0); // version 1 implies 50256
    check_tokenizer_fails("t.bin", "of which 50256", "");
    size_t nbytes = write_tokenizer("t.bin", 20240328, 2, 300, 11);
    CHECK(truncate(in_dir("t.bin"), (off_t)nbytes - 1) == 0);
    check_tokenizer_fails("t.bin", "ends in token 299 of 300", "truncated");
    CHECK(truncate(in_dir("t.bin"), (off_t)nbytes + 4) == 0);
    check_tokenizer_fails("t.bin", "goes on for 4 bytes", "300 tokens");
    CHECK(truncate(in_dir("t.bin"), 1024) == 0 && truncate(in_dir("t.bin"), 1028) == 0);
    check_tokenizer_fails("t.bin", "token 0 of 300 has no bytes", "");
}

// the lowest number that a file opened now would get
static int next_fd(void) {
    int fd = dup(0);
    close(fd);
    return fd;
}

int main(void) {
    int fd = next_fd();
    const char* tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/test_data_XXXXXX", tmp ? tmp : "/tmp");
    CHECK(mkdtemp(dir) != NULL);
    test_u32();
    test_normal();
    for (int P = 1; P <= 4; P++) {
        test_sequential(P);
    }
    write_shuffled_shards();
    test_shuffled();
    for (int P = 1; P <= 4; P++) {
        test_resume(P, 0);
        test_resume(P, 1);
    }
    test_resume_reshaped();
    test_resume_errors();
    test_large();
    test_shard_errors();
    test_other_errors();
    test_tokenizer();
    test_encode();
    test_print();
    test_tokenizer_errors();
    CHECK_AT("at the end");
    CHECK(next_fd() == fd); // every file was closed
    char clean[300];
    snprintf(clean, sizeof clean, "rm -rf '%s'", dir);
    CHECK(system(clean) == 0);
    return check_report();
}
