/* test_hellaswag.c -- the reader of llm.c's HellaSwag set, rows made of it, and the choice among hand-made
 * losses. A file of three examples is made word by word; each of its fields is then damaged. What a model
 * gets right: dev/test/eval_test.py.
 */
#include "dev/test/files.h"
#include "train/gpt.h"
#include "train/hellaswag.h"

enum { V = 100, NWORDS = 23 + 22 + 21 };

// three examples: contexts of 3, 2 and 1 tokens, completions of other lengths
static const uint16_t examples[NWORDS] = {
    65535, 46, 0, 2, 4, 3, 10, 11, 12, 1,  20, 4,  21, 22, 23, 24, 2,  25, 26, 3,  27, 28, 29, // 23 words
    65535, 44, 1, 0, 4, 2, 99, 0,  2,  30, 31, 2,  32, 33, 4,  34, 35, 36, 37, 2,  38, 39,     // 22 words
    65535, 42, 2, 3, 4, 1, 50, 5,  60, 61, 62, 63, 64, 1,  65, 1,  66, 3,  67, 68, 69,         // 21 words
};

// the file, its words of header and body changed: header[i] = value, words[i] = value; cut to nbytes
typedef struct {
    int32_t header[256];
    uint16_t words[NWORDS + 8];
    size_t nbytes;
} File;

static File good_file(void) {
    File f;
    memset(&f, 0, sizeof f);
    f.header[0] = 20240522, f.header[1] = 1, f.header[2] = 3, f.header[3] = 46;
    memcpy(f.words, examples, sizeof examples);
    f.nbytes = sizeof f.header + sizeof examples;
    return f;
}

static const char* spilled(const File* f) {
    const char* path = in_folder("hellaswag.bin");
    char all[sizeof f->header + sizeof f->words];
    memcpy(all, f->header, sizeof f->header);
    memcpy(all + sizeof f->header, f->words, sizeof f->words);
    spill(path, all, f->nbytes);
    return path;
}

static void refused(const File* f, const char* says) {
    HellaSwag h;
    char err[TRAIN_ERR] = "";
    CHECK_AT("%s", says);
    CHECK(hellaswag_open(&h, spilled(f), V, 16, err) == -1);
    CHECK_HAS(err, says);
    CHECK(strchr(err, '\n') == NULL && h.words == NULL && h.first == NULL && h.n == 0);
}

static void test_rows(void) {
    static const int begin[12] = {2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0},
                     end[12] = {3, 6, 4, 5, 3, 3, 5, 3, 5, 1, 1, 3};
    static const int ids[] = {10, 11, 12, 21, 22, 23, 0, 0}, targets[] = {11, 12, 21, 22, 23, 24, 0, 0};
    const File f = good_file();
    HellaSwag h;
    char err[TRAIN_ERR] = "";
    int got[2][8], zeros[8] = {0};
    CHECK(hellaswag_open(&h, spilled(&f), V, 6, err) == 0 && err[0] == 0);
    CHECK(h.n == 3 && h.longest == 6);
    for (int i = 0; i < 3; i++) {
        CHECK(hellaswag_label(&h, i) == (i == 0 ? 2 : i == 1 ? 0 : 3));
    }
    for (size_t i = 0; i < 12; i++) {
        CHECK_AT("row %zu", i);
        HellaSpan span = hellaswag_row(&h, i, 8, got[0], got[1]), same = hellaswag_span(&h, i);
        CHECK(span.begin == begin[i] && span.end == end[i]);
        CHECK(same.begin == begin[i] && same.end == end[i]);
        if (i == 1) {
            CHECK_BITS(got[0], ids, sizeof ids);
            CHECK_BITS(got[1], targets, sizeof targets);
        }
        if (i == 9) { CHECK(got[0][0] == 50 && got[1][0] == 65 && got[0][1] == 0 && got[1][1] == 0); }
    }
    CHECK_AT("beyond the last");
    for (size_t i = 12; i < 15; i++) {
        memset(got, 1, sizeof got);
        HellaSpan span = hellaswag_row(&h, i, 8, got[0], got[1]);
        CHECK(span.begin == span.end);
        CHECK_BITS(got[0], zeros, sizeof zeros);
        CHECK_BITS(got[1], zeros, sizeof zeros);
    }
    hellaswag_close(&h);
    CHECK(h.words == NULL && h.n == 0);
    CHECK(hellaswag_open(&h, spilled(&f), V, 5, err) == -1);
    CHECK_HAS(err, "example 0 has 7 tokens with its longest completion, -t 5: -t 6 at least");
}

static void test_choice(void) {
    // sums of losses over 1, 4, 2, 3 tokens; 2, 2, 4, 2; 5, 1, 1, 3
    static const struct {
        int example;
        double sums[4];
        int choice;
    } cases[] = {
        {0, {1.5, 4.0, 3.0, 6.0}, 1}, // the mean, not the sum
        {0, {2.0, 8.0, 4.0, 6.0}, 0}, // the first on a tie
        {0, {2.5, 8.0, 4.0, 6.0}, 1},   {0, {2.0, 8.0, 4.0, 5.9}, 3}, {1, {2.0, 2.0, 3.9, 2.0}, 2},
        {1, {2.1, 2.0, 4.1, 2.0}, 1},   {2, {4.9, 1.0, 1.0, 3.0}, 0}, {2, {5.1, 1.0, 0.99, 3.0}, 2},
        {2, {-5.1, 1.0, 0.99, 3.0}, 0},
    };
    const File f = good_file();
    HellaSwag h;
    char err[TRAIN_ERR] = "";
    CHECK(hellaswag_open(&h, spilled(&f), V, 16, err) == 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_AT("case %zu", i);
        CHECK(hellaswag_choice(&h, cases[i].example, cases[i].sums) == cases[i].choice);
    }
    hellaswag_close(&h);
}

// rows of a batch are as short as can be cut and scored within what training has room for
static void test_lengths(void) {
    static const int meshes[][2] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {1, 3}, {3, 4}};
    char* argv[] = {(char*)"test_hellaswag"};
    char err[TRAIN_ERR];
    TrainOptions opt;
    GPT g;
    int shorter = 0, longer = 0;
    CHECK(options_parse(&opt, 1, argv, err) == 0);
    for (int i = 0; i < 6 * 30 * 3; i++) {
        const int B = i / 18 + 1, P = meshes[i % 6][0] * meshes[i % 6][1];
        opt.up = meshes[i % 6][0], opt.tp = meshes[i % 6][1], opt.batch = B, opt.seq_len = 480;
        opt.overlap.m = i / 6 % 3 == 2 ? 5 : 1 + i / 6 % 3;
        gpt_sizes(&g, config(2, 48, 12, 300, 480), &opt, 0);
        const size_t Nt = (size_t)B * 480 / (size_t)opt.up,
                     room = Nt / (size_t)gpt_head_slices(Nt, opt.tp, g.head_chunks);
        int wrong = 0;
        for (int longest = 1; longest <= 480; longest += 13) {
            const int T = gpt_short_T(&g, longest), floor = (longest + 31) / 32 * 32;
            const size_t rows = (size_t)B * (size_t)T / (size_t)opt.up;
            wrong += T < longest || T > 480 || (T != 480 && !gpt_can_cut(&g, B, T));
            wrong += rows / (size_t)gpt_head_slices(rows, opt.tp, g.head_chunks) > room;
            wrong += P == 1 && B <= 2 && T != floor; // where nothing is cut
            shorter += T == floor, longer += T > floor;
        }
        CHECK_AT("B=%d up=%d tp=%d m=%d", B, opt.up, opt.tp, opt.overlap.m);
        CHECK(wrong == 0);
    }
    CHECK_AT("lengths");
    CHECK(shorter > 1000 && longer > 1000);
    gpt_sizes(&g, config(2, 48, 12, 300, 480), &opt, 0);
    g.T_max = 40; // not a multiple of 32
    CHECK(gpt_short_T(&g, 33) == 40);
}

static void test_header(void) {
    static const struct {
        int word;
        int32_t value;
        const char* says;
    } headers[] = {
        {0, 20240520, "is a token shard, not a HellaSwag set"},
        {0, 20240523, "starts with 20240523, a HellaSwag set with 20240522"},
        {1, 2, "has version 2; only version 1"},
        {1, 0, "has version 0"},
        {2, 0, "says that it has 0 examples; its 132 bytes have room for 1 to 4"},
        {2, -1, "says that it has -1 examples"},
        {2, INT32_MAX, "says that it has 2147483647 examples"},
        {2, 5, "says that it has 5 examples"},
        {2, 4, "ends within example 3"},
        {2, 2, "42 bytes follow the last of its 2 examples"},
    };
    HellaSwag h;
    char err[TRAIN_ERR];
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        File f = good_file();
        f.header[headers[i].word] = headers[i].value;
        refused(&f, headers[i].says);
    }
    for (size_t nbytes = 0; nbytes < good_file().nbytes; nbytes++) { // cut anywhere
        File f = good_file();
        f.nbytes = nbytes;
        refused(&f, nbytes < 4      ? "and starts with"
                    : nbytes < 1024 ? "its header alone has 1024"
                    : nbytes % 2    ? "want an even number"
                    : nbytes < 1114 ? "says that it has 3 examples"
                                    : "hellaswag.bin: ");
    }
    File f = good_file();
    f.nbytes += 2;
    refused(&f, "2 bytes follow the last of its 3 examples");
    CHECK(hellaswag_open(&h, in_folder("none.bin"), V, 16, err) == -1);
    CHECK_HAS(err, "--hellaswag-data: can't open ");
    CHECK(hellaswag_open(&h, folder, V, 16, err) == -1);
    CHECK_HAS(err, "is not a regular file");
}

static void test_words(void) {
    static const struct {
        int word;
        uint16_t value;
        const char* says;
    } words[] = {
        {0, 65534, "example 0 begins with 65534, want 65535"},
        {23, 0, "example 1 begins with 0, want 65535"},
        {1, 0, "example 0 says that it has 0 bytes; want an even number of 30 to 132"},
        {1, 28, "example 0 says that it has 28 bytes"},
        {1, 45, "example 0 says that it has 45 bytes"},
        {1, 134, "example 0 says that it has 134 bytes"},
        {1, 65535, "example 0 says that it has 65535 bytes"},
        {1, 44, "example 0: its completion has 3 tokens, 4 bytes before the example ends"},
        {1, 48, "example 0 has 48 bytes, but its tokens end after 46"},
        {46, 44, "example 2 says that it has 44 bytes"},
        {2, 1, "example 0 says that it is number 1"},
        {25, 65535, "example 1 says that it is number 65535"},
        {3, 4, "example 0: completion 4 is said to be right, want 0 to 3"},
        {48, 65535, "example 2: completion 65535"},
        {4, 3, "example 0 has 3 completions, want 4"},
        {4, 5, "example 0 has 5 completions"},
        {5, 0, "example 0: its context has 0 tokens"},
        {5, 65535, "example 0: its context has 65535 tokens, 34 bytes before the example ends"},
        {5, 18, "example 0: its context has 18 tokens"},
        {5, 17, "example 0: its completion has 0 tokens, 0 bytes"},
        {5, 16, "example 0: its completion has 29 tokens, 0 bytes"},
        {9, 0, "example 0: its completion has 0 tokens"},
        {9, 65535, "example 0: its completion has 65535 tokens"},
        {19, 4, "example 0: its completion has 4 tokens"},
        {19, 2, "example 0 has 46 bytes, but its tokens end after 44"},
        {6, 100, "example 0: token 100 is not below the vocabulary, V=100"},
        {22, 100, "example 0: token 100"},
        {65, 65535, "example 2: token 65535"},
    };
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        File f = good_file();
        f.words[words[i].word] = words[i].value;
        refused(&f, words[i].says);
    }
}

int main(void) {
    if (!folder_open("test_hellaswag")) { return 1; }
    test_rows();
    test_choice();
    test_lengths();
    test_header();
    test_words();
    folder_close();
    return check_report();
}
