/* test_options.c -- the command line: every option in each of its forms, every refusal, --help, model
 * descriptors.
 */
#include "dev/test/check.h"
#include "train/checkpoint.h"
#include "train/options.h"
#include <limits.h>
#include <stdlib.h>

#define CHECK_HAS(text, part)                                                                \
    do {                                                                                     \
        if (!strstr(text, part)) { fprintf(stderr, "wanted '%s', got '%s'\n", part, text); } \
        CHECK(strstr(text, part) != NULL);                                                   \
    } while (0)

// ---- models -----------------------------------------------------------------------------------------------
static void test_models(void) {
    const struct {
        const char* text;
        int L, C, NH, V, maxT;
        size_t ntotal; // with padded vocabulary; 0: not checked
    } good[] = {
        {"d12", 12, 768, 12, 50257, 1024, 124475904},
        {"gpt2:d12", 12, 768, 12, 50257, 1024, 124475904},
        {"d6", 6, 384, 6, 50257, 1024, 0},
        {"d24", 24, 1024, 16, 50257, 1024, 354871296},
        {"d36", 36, 1280, 20, 50257, 1024, 774090240},
        {"gpt2:d48", 48, 1600, 25, 50257, 1024, 1557686400},
        {"d60", 60, 1920, 30, 50257, 1024, 0},
        {"d72", 72, 2880, 30, 50257, 1024, 0},
        {"d84", 84, 3456, 36, 50257, 1024, 0},
        {"gpt3:c384", 6, 384, 6, 50257, 2048, 0},
        {"gpt3:c768", 12, 768, 12, 50257, 2048, 125262336},
        {"gpt3:c1536", 24, 1536, 16, 50257, 2048, 0},
        {"gpt3:c2560", 32, 2560, 32, 50257, 2048, 0},
        {"gpt3:c12288", 96, 12288, 96, 50257, 2048, 0},
        {"L=4,C=128,NH=4,V=256,maxT=256", 4, 128, 4, 256, 256, 858880},
        {"maxT=7,NH=1,C=3,L=1", 1, 3, 1, 50257, 7, 0},
        {"L=1024,C=65536,NH=1024,V=16777216,maxT=1048576", 1024, 65536, 1024, 16777216, 1048576, 0},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        GPTConfig c;
        Tensors ts;
        char err[TRAIN_ERR];
        CHECK_AT("%s", good[i].text);
        memset(&c, 0xff, sizeof c);
        CHECK(model_parse(good[i].text, &c, err) == 0);
        CHECK(c.L == good[i].L && c.C == good[i].C && c.NH == good[i].NH && c.V == good[i].V);
        CHECK(c.maxT == good[i].maxT && c.Vp % 128 == 0 && c.Vp >= c.V && c.Vp < c.V + 128);
        tensors_init(&ts, c, (TensorCuts){1, 0, 1, 1, 0});
        CHECK(good[i].ntotal == 0 || ts.ntotal == good[i].ntotal);
    }
    const char* const bad[][2] = {
        {"d13", "6, 12, 24"},
        {"d", "ends in .bin"},
        {"d12x", "6, 12, 24"},
        {"d99999999999999999999", "6, 12, 24"},
        {"gpt3:c5140", "384, 768"},
        {"gpt2:c768", "ends in .bin"},
        {"gpt4:d12", "ends in .bin"},
        {"", "ends in .bin"},
        {".bin", "ends in .bin"},
        {"weights.pt", "ends in .bin"},
        {"L=4,C=128", "NH is missing"},
        {"C=128,NH=4", "L is missing"},
        {"L=4,C=128,NH=4,L=4", "L is given twice"},
        {"L=4,C=130,NH=4", "not a multiple of NH=4"},
        {"L=0,C=128,NH=4", "'L=0': want a whole number above 0"},
        {"L=-4,C=128,NH=4", "'L=-4'"},
        {"L=4x,C=128,NH=4", "'L=4x'"},
        {"L=,C=128,NH=4", "'L='"},
        {"L=4,C=128,NH=4,", "'' is not one of"},
        {"L=4,,C=128,NH=4", "'' is not one of"},
        {"L=4,C=128,NH=4,H=3", "'H=3' is not one of"},
        {"L=4,C=128,NH=4,V", "'V' is not one of"},
        {"L=4,C=128,NH=4,V=99999999999", "V=99999999999"},
        {"L=4,C=128,NH=4,V=2147483647", "want 1 to 16777216"},
        {"L=4,C=128,NH=4,V=0000000000000000000000000000000000000000000000256", "want a whole number"},
        {"L=1025,C=128,NH=4", "L=1025, want 1 to 1024"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        GPTConfig c;
        char err[TRAIN_ERR] = "";
        CHECK_AT("%s", bad[i][0]);
        CHECK(model_parse(bad[i][0], &c, err) == -1);
        CHECK_HAS(err, bad[i][1]);
    }
    GPTConfig c;
    char err[TRAIN_ERR];
    CHECK(model_parse("some/gpt2_124M.bin", &c, err) == 1);
}

// ---- options ----------------------------------------------------------------------------------------------
// a line of arguments, cut at blanks; '' is an empty one
static int parse_line(TrainOptions* o, const char* line, char err[TRAIN_ERR]) {
    static char copy[8][1024]; // strings in o point into it: the last eight lines stay
    static int turn;
    char *argv[64] = {"train_gpt"}, *at = copy[turn++ % 8], *save;
    int argc = 1;
    (void)snprintf(at, sizeof copy[0], "%s", line);
    for (char* word = strtok_r(at, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        argv[argc++] = strcmp(word, "''") == 0 ? "" : word;
    }
    err[0] = 0;
    return options_parse(o, argc, argv, err);
}

#define AT(field) offsetof(TrainOptions, field)
static const struct {
    const char *s, *l; // names
    size_t at;
    char kind; // i, f, d: numbers; s: string
    double fallback;
    const char* text; // a string's default
    const char* value;
    double want;
} all_options[] = {
    {"-i", "--train-data", AT(train_data), 's', 0, "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "a",
     0},
    {"-j", "--val-data", AT(val_data), 's', 0, "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", "b*.bin",
     0},
    {"-e", "--model", AT(model), 's', 0, "gpt2_124M_bf16.bin", "L=1,C=2,NH=1", 0},
    {"-o", "--out", AT(out), 's', 0, "", "log", 0},
    {"-n", "--checkpoint-every", AT(checkpoint_every), 'i', 0, NULL, "250", 250},
    {"-nk", "--keep-checkpoints", AT(keep_checkpoints), 'i', 0, NULL, "5", 5},
    {"-nm", "--major-checkpoint-every", AT(major_checkpoint_every), 'i', 0, NULL, "2000", 2000},
    {"-y", "--resume", AT(resume), 'i', 0, NULL, "1", 1},
    {"-b", "--batch", AT(batch), 'i', 4, NULL, "64", 64},
    {"-t", "--seq-len", AT(seq_len), 'i', 1024, NULL, "256", 256},
    {"-d", "--total-batch", AT(total_batch), 'i', 4096, NULL, "524288", 524288},
    {"-x", "--max-steps", AT(max_steps), 'i', -1, NULL, "18865", 18865},
    {"-a", "--overfit", AT(overfit), 'i', 0, NULL, "1", 1},
    {NULL, "--seed", AT(seed), 'i', 42, NULL, "2147483647", 2147483647},
    {NULL, "--data-seed", AT(data_seed), 'i', 42, NULL, "0", 0},
    {"-k", "--schedule", AT(schedule), 'i', SCHEDULE_COSINE, NULL, "wsd", SCHEDULE_WSD},
    {"-l", "--lr", AT(lr), 'f', 3e-4, NULL, "0.0006", 0.0006},
    {"-u", "--warmup", AT(warmup), 'i', 0, NULL, "700", 700},
    {"-q", "--final-lr-fraction", AT(final_lr_fraction), 'f', 1, NULL, ".1", 0.1},
    {"-c", "--weight-decay", AT(weight_decay), 'f', 0, NULL, "1e-1", 0.1},
    {NULL, "--beta1", AT(beta1), 'f', 0.9, NULL, "0", 0},
    {NULL, "--beta2", AT(beta2), 'f', 0.95, NULL, "0.999", 0.999},
    {NULL, "--eps", AT(eps), 'f', 1e-8, NULL, "1e-6", 1e-6},
    {NULL, "--clip", AT(clip), 'f', 1, NULL, "0", 0},
    {"-w", "--master-weights", AT(master_weights), 'i', 1, NULL, "1", 1},
    {"-sl", "--skip-loss-z", AT(skip_loss_z), 'f', 0, NULL, "5", 5},
    {"-sg", "--skip-grad-z", AT(skip_grad_z), 'f', 0, NULL, "5.5", 5.5},
    {NULL, "--ignore-nan", AT(ignore_nan), 'i', 0, NULL, "1", 1},
    {NULL, "--z-loss", AT(z_loss), 'f', 0, NULL, "1e-4", 1e-4},
    {"-v", "--val-every", AT(val_every), 'i', 20, NULL, "0", 0},
    {"-m", "--val-batches", AT(val_batches), 'i', 20, NULL, "-1", -1},
    {"-h", "--hellaswag", AT(hellaswag), 'i', 0, NULL, "1", 1},
    {NULL, "--hellaswag-data", AT(hellaswag_data), 's', 0, "dev/data/hellaswag/hellaswag_val.bin", "h.bin",
     0},
    {"-s", "--sample-every", AT(sample_every), 'i', 20, NULL, "7", 7},
    {"-g", "--sample-length", AT(sample_length), 'i', 64, NULL, "144", 144},
    {NULL, "--tokenizer", AT(tokenizer), 's', 0, "gpt2_tokenizer.bin", "t.bin", 0},
    {NULL, "--prompt", AT(prompt), 's', 0, "", "Juliet", 0},
    {NULL, "--temperature", AT(temperature), 'f', 1, NULL, "0", 0},
    {NULL, "--top-k", AT(top_k), 'i', 0, NULL, "40", 40},
    {NULL, "--sample-seed", AT(sample_seed), 'i', 1337, NULL, "1", 1},
    {NULL, "--log-json", AT(log_json), 's', 0, "", "log.json", 0},
    {"-lg", "--device-log-every", AT(device_log_every), 'i', 0, NULL, "-1", -1},
    {NULL, "--profile", AT(profile.first), 'i', 0, NULL, "3-5", 3},
    {NULL, "--profile", AT(profile.last), 'i', 0, NULL, "3-5", 5},
    {NULL, "--prompt-file", AT(prompt_file), 's', 0, "", "prompts.txt", 0},
    {NULL, "--dp", AT(dp), 'i', 1, NULL, "16", 16},
    {NULL, "--up", AT(up), 'i', 1, NULL, "16", 16},
    {NULL, "--tp", AT(tp), 'i', 1, NULL, "16", 16},
    {"-z", "--zero", AT(zero), 'i', 0, NULL, "2", 2},
    {"-r", "--recompute", AT(recompute), 'i', 1, NULL, "3", 3},
    {NULL, "--keep-gathered", AT(keep_gathered), 'i', 0, NULL, "1", 1},
    {"-ge", "--gelu-fusion", AT(gelu_fusion), 'i', 0, NULL, "2", 2},
    {NULL, "--deterministic", AT(deterministic), 'i', 0, NULL, "1", 1},
    {"-f", "--tf32", AT(tf32), 'i', 1, NULL, "0", 0},
#if FO_DEVICE_CPU
    {NULL, "--graph", AT(graph), 'i', 0, NULL, "0", 0},
#else
    {NULL, "--graph", AT(graph), 'i', 0, NULL, "1", 1},
#endif
    {NULL, "--sp", AT(sp), 'i', 1, NULL, "0", 0},
    {NULL, "--overlap", AT(overlap.m), 'i', 0, NULL, "slice:4", 4},
    {NULL, "--overlap", AT(overlap.m), 'i', 0, NULL, "flash", 1},
    {NULL, "--overlap", AT(overlap.m), 'i', 0, NULL, "auto", 0},
    {NULL, "--overlap", AT(overlap.mode), 'i', FO_FLASH, NULL, "none", FO_NONE},
    {NULL, "--overlap", AT(overlap.mode), 'i', FO_FLASH, NULL, "slice:2", FO_SLICE},
    {"-pi", "--init", AT(init), 'i', FO_INIT_AUTO, NULL, "fs", FO_INIT_FS},
    {"-pn", "--num-processes", AT(num_processes), 'i', 0, NULL, "1", 1},
    {"-pr", "--process-rank", AT(process_rank), 'i', -1, NULL, "0", 0},
    {"-pg", "--processes-per-node", AT(processes_per_node), 'i', 0, NULL, "8", 8},
    {"-ps", "--server", AT(server), 's', 0, "", "node1", 0},
    {NULL, "--port", AT(port), 'i', 0, NULL, "29500", 29500},
    {"-pf", "--init-folder", AT(init_folder), 's', 0, "", "meet", 0},
    {NULL, "--topology", AT(topology), 'i', FO_DIRECT, NULL, "ring", FO_RING},
    {NULL, "--wire", AT(wire), 'i', FO_FLOATX, NULL, "fp32", FO_FP32},
#if FO_DEVICE_CPU
    {NULL, "--link", AT(link.gbytes_s), 'd', 0, NULL, "12.5,3", 12.5},
    {NULL, "--link", AT(link.us), 'd', 0, NULL, "12.5,0", 0},
    {NULL, "--pace", AT(pace), 'd', 0, NULL, "0.25", 0.25},
    {NULL, "--timeout", AT(timeout), 'd', 60, NULL, "2.5", 2.5},
#endif
};
#define NALL (sizeof all_options / sizeof all_options[0])

static int field_is(const TrainOptions* o, size_t i, double number, const char* text) {
    const void* field = (const char*)o + all_options[i].at;
    switch (all_options[i].kind) {
    case 'i': return *(const int*)field == (int)number;
    case 'f': return *(const float*)field == (float)number;
    case 'd': return *(const double*)field == number;
    default: return strcmp(*(const char* const*)field, text) == 0;
    }
}

static void test_options_good(void) {
    TrainOptions o;
    char err[TRAIN_ERR], line[512];
    CHECK_AT("defaults");
    CHECK(parse_line(&o, "", err) == 0);
    for (size_t i = 0; i < NALL; i++) {
        CHECK_AT("default of %s", all_options[i].l);
        CHECK(field_is(&o, i, all_options[i].fallback, all_options[i].text));
    }
    CHECK(!o.help && !o.dry_run && !o.comm_report && !o.generate && !o.eval && o.world == 0);
    for (size_t i = 0; i < NALL; i++) {
        const char *s = all_options[i].s, *l = all_options[i].l, *v = all_options[i].value;
        const int init = strcmp(l, "--init") == 0; // it needs a number of processes
        // -n and -y need a folder
        const char* base = strcmp(l, "--out") == 0 ? "" : init ? "-o there -pn 1 " : "-o there ";
        for (int form = s ? 0 : 1; form < 3; form++) {
            (void)snprintf(line, sizeof line, "%s%s%c%s", base, form == 0 ? s : l, form == 2 ? '=' : ' ', v);
            CHECK_AT("%.100s", line);
            CHECK(parse_line(&o, line, err) == 0);
            CHECK(err[0] == 0 && field_is(&o, i, all_options[i].want, v));
            for (size_t k = 0; k < NALL; k++) { // and nothing else has changed
                if (strcmp(l, all_options[k].l) == 0 || strcmp(all_options[k].l, "--out") == 0) { continue; }
                if (strcmp(all_options[k].l, "--total-batch") == 0) { continue; } // follows -b and -t
                if (init && strcmp(all_options[k].l, "--num-processes") == 0) { continue; }
                CHECK(field_is(&o, k, all_options[k].fallback, all_options[k].text));
            }
        }
    }
    CHECK_AT("--trace");
    CHECK(parse_line(&o, "", err) == 0 && o.trace[0] == 0 && o.trace_steps.first == 0);
    CHECK(parse_line(&o, "--trace t.json", err) == 0 && strcmp(o.trace, "t.json") == 0);
    CHECK(o.trace_steps.first == 0 && o.trace_steps.last == 0);
    CHECK(parse_line(&o, "--trace=t --trace-steps=3-2147483647", err) == 0);
    CHECK(o.trace_steps.first == 3 && o.trace_steps.last == INT_MAX);
    CHECK(parse_line(&o, "--trace t --trace-steps 7-7", err) == 0 && o.trace_steps.first == 7);
    CHECK(parse_line(&o, "--trace t --trace-steps second", err) == 0 && o.trace_steps.last == 0);
    CHECK_AT("--overlap's name");
    for (int i = 0; i < 4; i++) {
        static const char* const names[] = {"auto", "none", "slice:16", "flash:1"};
        char buf[32];
        (void)snprintf(line, sizeof line, "--overlap %s", names[i]);
        CHECK(parse_line(&o, line, err) == 0 && strcmp(overlap_name(o.overlap, buf), names[i]) == 0);
        CHECK(overlap_cut(o.overlap) == (i == 2 ? 16 : 1));
    }
    CHECK_AT("several");
    CHECK(parse_line(&o, "-b 2 -t 64 --overlap=flash:3 --dry-run --prompt '' -x -1 -x1", err) == -1);
    CHECK(parse_line(&o, "-b 2 -t 64 --overlap=flash:3 --dry-run --prompt= -x -1", err) == 0);
    CHECK(o.total_batch == 128 && o.overlap.mode == FO_FLASH && o.overlap.m == 3 && o.dry_run &&
          o.max_steps == -1);
    CHECK(o.prompt[0] == 0);
    CHECK(parse_line(&o, "--prompt=--help --link none", err) == 0 && strcmp(o.prompt, "--help") == 0 &&
          !o.help);
    CHECK(parse_line(&o, "--help -b nonsense", err) == 0 && o.help);
    CHECK(parse_line(&o, "--dp 2 --up 3 --tp 2 -b 2 -t 48", err) == 0 && o.dp == 2 && o.total_batch == 192);
    CHECK(parse_line(&o, "--dry-run --world 1024 --up 2 --tp 8", err) == 0 && o.dp == 64);
    CHECK(parse_line(&o, "--dry-run --dp 1024", err) == 0 && o.dp == 1024);
    CHECK(parse_line(&o, "--comm-report --generate", err) == 0 && o.comm_report && o.generate);
    CHECK(parse_line(&o, "--eval -h 1 -v 0", err) == 0 && o.eval && o.hellaswag && !o.help);
    CHECK(parse_line(&o, "-k linear", err) == 0 && o.schedule == SCHEDULE_LINEAR);
    CHECK(parse_line(&o, "-k constant", err) == 0 && o.schedule == SCHEDULE_CONSTANT);
}

// a line, and two things that its message says
static const char* const bad_lines[][3] = {
    {"-xq 5", "'-xq'", "did you mean -x (--max-steps)?"},
    {"--max-step 5", "'--max-step'", "did you mean --max-steps?"},
    {"--max-stepss 5", "'--max-stepss'", "did you mean --max-steps?"},
    {"--nonsense", "unknown option '--nonsense'", "--help"},
    {"-", "unknown option '-'", "--help"},
    {"--", "unknown option '--'", "--help"},
    {"-Q", "unknown option '-Q'", "--help"},
    {"5", "'5' is not an option", "--help"},
    {"-b=4", "'-b=4'", "did you mean -b (--batch)?"},
    {"-b 4x", "-b '4x'", "not a whole number; want 1 to 1048576"},
    {"-b ''", "-b ''", "not a whole number"},
    {"--batch=", "--batch ''", "not a whole number"},
    {"-b 4.0", "-b '4.0'", "not a whole number"},
    {"-b 0x10", "-b '0x10'", "not a whole number"},
    {"-b nan", "-b 'nan'", "not a whole number"},
    {"-b 0", "-b '0'", "out of range; want 1 to 1048576"},
    {"-b -1", "-b '-1'", "out of range"},
    {"-b 4294967300", "-b '4294967300'", "out of range"},
    {"-b 99999999999999999999999999", "-b '999", "out of range"},
    {"-x -2", "-x '-2'", "want -1, or 0 to 2^31-1"},
    {"-m 0", "-m '0'", "want -1, or 1 to 2^31-1"},
    {"-y 2", "-y '2'", "want 0 to 1"},
    {"--seed -1", "--seed '-1'", "want 0 to 2^31-1"},
    {"--tp 0", "--tp '0'", "want 1 to 16"},
    {"--tp 17", "--tp '17'", "want 1 to 16"},
    {"-l 3e-4x", "-l '3e-4x'", "is not a number; want 0 to 1000"},
    {"-l nan", "-l 'nan'", "is not a number"},
    {"--lr inf", "--lr 'inf'", "is not a number"},
    {"--lr=", "--lr ''", "is not a number"},
    {"-l 1e999", "-l '1e999'", "out of range"},
    {"-l -1e-4", "-l '-1e-4'", "out of range"},
    {"-l 3e-4-", "-l '3e-4-'", "is not a number"},
    {"-b 4-4", "-b '4-4'", "not a whole number"},
    {"-l e", "-l 'e'", "is not a number"},
    {"-q 1.5", "-q '1.5'", "want 0 to 1"},
    {"--temperature -0.5", "--temperature '-0.5'", "want 0 to 100"},
    {"-k cosin", "-k 'cosin'", "cosine|linear|constant|wsd"},
    {"-k cosine|linear", "-k 'cosine|linear'", "want one of"},
    {"-k ''", "-k ''", "want one of"},
    {"--topology star", "--topology 'star'", "direct|ring"},
    {"--wire fp16", "--wire 'fp16'", "bf16|fp32"},
    {"--overlap slice", "--overlap 'slice'", "slice:M"},
    {"--overlap slice:", "--overlap 'slice:'", "slice:M"},
    {"--overlap slice:0", "--overlap 'slice:0'", "1 to 16"},
    {"--overlap flash:17", "--overlap 'flash:17'", "1 to 16"},
    {"--overlap flash:2x", "--overlap 'flash:2x'", "flash:M"},
    {"--overlap none:1", "--overlap 'none:1'", "none"},
    {"--overlap auto:2", "--overlap 'auto:2'", "auto, none"},
    {"--overlap flashy", "--overlap 'flashy'", "flash"},
    {"--link 50", "--link '50'", "50,5"},
    {"--link 0,5", "--link '0,5'", "above 0"},
    {"--link 50,-1", "--link '50,-1'", "microseconds"},
    {"--link 50,5,3", "--link '50,5,3'", "50,5"},
    {"--link ,", "--link ','", "50,5"},
    {"--pace -1", "--pace '-1'", "want 0 to"},
    {"-e ''", "-e ''", "is empty; want MODEL"},
    {"-b", "-b needs a value", "B"},
    {"--train-data", "--train-data needs a value", "FILES"},
    {"-i -j x", "-i needs a value", "followed by -j"},
    {"-b --tp=2", "-b needs a value", "followed by --tp=2"},
    {"--help=1", "--help takes no value", "'1'"},
    {"--dry-run=", "--dry-run takes no value", "''"},
    {"-b 4 -b 4", "-b is given twice", "'4' and as '4'"},
    {"-b 4 --batch=8", "--batch is given twice", "'4' and as '8'"},
    {"--dry-run --dry-run", "--dry-run is given twice", "once"},
    {"-d 1000", "--total-batch 1000 is not a multiple", "= 4096 tokens; want 4096"},
    {"-d 10000", "--total-batch 10000", "want 8192"},
    {"-b 1048576 -t 1048576", "--batch 1048576", "2147483647"},
    {"-n 5", "--checkpoint-every", "--out DIR"},
    {"-y 1", "--resume 1", "--out DIR"},
    {"-z 3", "-z '3'", "want 0 to 2"},
    {"-r 4", "-r '4'", "want 0 to 3"},
    {"--dp 1025", "--dp '1025'", "want 0 to 1024"},
    {"--up 17", "--up '17'", "want 1 to 16"},
    {"--dp 3 --up 3 --tp 2", "make 18 ranks", "16 at most"},
    {"--dp 17", "make 17 ranks", "16 at most"},
    {"--dry-run --dp 1024 --tp 2", "make 2048 ranks", "1024 at most"},
    {"--world 8", "--world 8 is for --dry-run", "--dp * --up * --tp"},
    {"--dry-run --world 8 --dp 3 --up 2", "make 6 ranks", "not --world 8"},
    {"--dry-run --world 1000 --up 3 --tp 2", "1000 ranks, which --up 3 * --tp 2 = 6", "want 996"},
    {"-b 2 -t 8 --dp 2 -d 16", "--total-batch 16", "= 32 tokens; want 32"},
    {"--trace ''", "--trace ''", "want FILE"},
    {"--trace-steps 2-3", "--trace-steps 2-3 needs a file", "--trace FILE"},
    {"--trace t --generate", "--trace is of training", "--generate"},
    {"--trace t --trace-steps 0-3", "--trace-steps '0-3'", "3-5"},
    {"--trace t --trace-steps 3-2", "--trace-steps '3-2'", "from 1 on"},
    {"--trace t --trace-steps 3", "--trace-steps '3'", "3-5"},
    {"--trace t --trace-steps -3", "--trace-steps '-3'", "3-5"},
    {"--trace t --trace-steps 3-", "--trace-steps '3-'", "3-5"},
    {"--trace t --trace-steps 3-4-5", "--trace-steps '3-4-5'", "3-5"},
    {"--trace t --trace-steps 1-2147483648", "--trace-steps '1-2147483648'", "3-5"},
    {"--trace t --trace-steps 9999999999999999-2", "--trace-steps '9999999999999999-2'", "3-5"},
    {"--profile second", "--profile 'second'", "or none"},
    {"--profile 2-3 --trace t", "--profile is of training", "without --trace"},
    {"--profile 2-3 --generate", "--profile is of training", "without --generate"},
    {"--log-json ''", "--log-json ''", "want FILE"},
    {"--log-json l --generate", "--log-json is of training", "--generate"},
    {"-lg -2", "-lg '-2'", "want -1, or 0 to"},
    {"-w 2", "-w '2'", "want 0 to 1"},
    {"-f 2", "-f '2'", "want 0 to 1"},
    {"--beta1 1", "--beta1 '1'", "want 0 to 0.99999"},
    {"--beta2 -0.1", "--beta2 '-0.1'", "want 0 to 0.99999"},
    {"--eps 0", "--eps '0'", "want 1e-20 to 1"},
    {"--clip -1", "--clip '-1'", "want 0 to 1000000000"},
    {"--sample-seed 0", "--sample-seed '0'", "want 1 to 2^31-1"},
    {"--data-seed -1", "--data-seed '-1'", "want 0 to 2^31-1"},
    {"--prompt a --prompt-file b", "--prompt and --prompt-file", "want one"},
    {"-h", "-h needs a value: 0|1; it is HellaSwag's", "help is --help"},
    {"-h 2", "-h '2'", "want 0 to 1"},
    {"--z-loss -1", "--z-loss '-1'", "want 0 to 1"},
    {"--z-loss 2", "--z-loss '2'", "want 0 to 1"},
    {"--eval -v 0", "--eval has nothing to do", "want -h 1"},
    {"--eval --generate", "--generate, --eval", "want one"},
    {"--eval --dry-run", "--eval, --dry-run", "want one"},
    {"--trace t --eval", "--trace is of training", "--eval"},
};

static void test_options_bad(void) {
    for (size_t i = 0; i < sizeof bad_lines / sizeof bad_lines[0]; i++) {
        TrainOptions o;
        char err[TRAIN_ERR];
        CHECK_AT("%s", bad_lines[i][0]);
        CHECK(parse_line(&o, bad_lines[i][0], err) == -1);
        CHECK_HAS(err, bad_lines[i][1]);
        CHECK_HAS(err, bad_lines[i][2]);
        CHECK(strchr(err, '\n') == NULL);
    }
    TrainOptions o;
    char err[TRAIN_ERR];
    CHECK_AT("-w 0"); // fp32 weights are their own masters
    CHECK(parse_line(&o, "-w 0", err) == (FO_FLOATX == FO_BF16 ? -1 : 0));
    if (FO_FLOATX == FO_BF16) { CHECK_HAS(err, "bf16 weights alone would lose the small updates"); }
    CHECK_AT("--wire bf16");
    CHECK(parse_line(&o, "--wire bf16", err) == (FO_FLOATX == FO_BF16 ? 0 : -1));
}

// every default that --help prints, given on the command line, changes nothing
static void test_options_help(void) {
    char *text = NULL, *save, err[TRAIN_ERR], line[256];
    size_t nbytes = 0, nseen = 0, ndefaults = 0;
    FILE* f = open_memstream(&text, &nbytes);
    options_help(f, "train_gpt");
    fclose(f);
    TrainOptions plain, o;
    CHECK(parse_line(&plain, "", err) == 0);
    for (size_t i = 0; i < NALL; i++) {
        (void)snprintf(line, sizeof line, "%s ", all_options[i].l);
        nseen += strstr(text, line) != NULL;
    }
    CHECK(nseen == NALL && strstr(text, "--help") && strstr(text, "--dry-run"));
    const char* name = ""; // of the last option seen; its default may be on the next line
    for (char* l = strtok_r(text, "\n", &save); l; l = strtok_r(NULL, "\n", &save)) {
        const char *option = strstr(l, "--"), *fallback = strstr(l, "default ");
        name = option ? option : name;
        CHECK_AT("%s", l);
        if (!fallback) { continue; }
        ndefaults++;
        (void)snprintf(line, sizeof line, "%.*s %.*s", (int)strcspn(name, " "), name,
                       (int)strcspn(fallback + 8, ")"), fallback + 8);
        CHECK(parse_line(&o, line, err) == 0);
        for (size_t i = 0; i < NALL; i++) {
            CHECK(field_is(&o, i, all_options[i].fallback, all_options[i].text));
        }
    }
    CHECK(ndefaults == 64);
    free(text);
}

int main(void) {
    test_models();
    test_options_good();
    test_options_bad();
    test_options_help();
    return check_report();
}
