/* hellaswag.h -- reads llm.c's hellaswag_val.bin, and scores what a model makes of it as llm.c does.
 *
 * An example is a context and four ways to go on; one is right. Each makes a row of the batch: the context,
 * then the completion. The completion whose tokens have the smallest mean loss is the model's choice. The
 * loop over batches is in train_gpt.cu; the format in doc/formats.md. Tests: dev/test/test_hellaswag.c.
 */
#ifndef HELLASWAG_H
#define HELLASWAG_H
#include "train/logger.h" // TRAIN_ERR
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { HELLASWAG_WAYS = 4 }; // completions of an example

typedef struct {
    int n;           // examples
    uint16_t* words; // the file behind its header
    size_t* first;   // [n] where in words an example begins
    int longest;     // tokens that the longest row puts into the model: all of its tokens but the last
} HellaSwag;

/* hellaswag_open -- reads and checks the whole file, so that nothing can be wrong later.
 *
 * V        the vocabulary of the model: every token is below
 * T        tokens of a row of the batch: the longest context and completion fit
 * Errors   -1 with one line in err: what is wrong with which example, and what would work. h is then empty.
 */
int hellaswag_open(HellaSwag* h, const char* path, int V, int T, char err[TRAIN_ERR]);
void hellaswag_close(HellaSwag* h);

// where a completion lies in its row: tokens at positions begin ... end-1 of the row's targets
typedef struct {
    int begin, end;
} HellaSpan;

/* hellaswag_row -- row i, completion i % 4 of example i / 4, as the model takes it; returns the targets that
 * count. A row beyond the last is zeros, of which nothing counts.
 */
HellaSpan hellaswag_row(const HellaSwag* h, size_t i, int T, // tokens of a row
                        int* ids,                            // [T]
                        int* targets);                       // [T]

// the same without the tokens
HellaSpan hellaswag_span(const HellaSwag* h, size_t i);

// which completion has the smallest mean loss, the first of several; sums: of the losses that count
int hellaswag_choice(const HellaSwag* h, int example, const double sums[HELLASWAG_WAYS]);
int hellaswag_label(const HellaSwag* h, int example); // the right one

#ifdef __cplusplus
}
#endif
#endif
