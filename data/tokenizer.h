/* tokenizer.h -- token ids -> bytes, for printing what a model wrote. Text -> ids is data/prepare.py's
 * work.
 *
 * Format: doc/formats.md. Tests: dev/test/test_data.c.
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H
#include "data/dataloader.h" // DATA_ERR_NBYTES
#ifdef __cplusplus
extern "C" {
#endif

// all zero: no tokenizer
typedef struct {
    int V;            // tokens
    int eot;          // the token that ends a document, from which sampling starts
    char* bytes;      // of all tokens
    uint32_t* offset; // [V + 1], of each token's bytes
} Tokenizer;

// 0, or -1 with one line in err: no such file, another kind of file, damaged. tk is then empty.
int tokenizer_init(Tokenizer* tk, const char* path, char err[DATA_ERR_NBYTES]);
void tokenizer_free(Tokenizer* tk);

// A token's bytes and their number; they are not a string, and may hold zeros. NULL and 0 for an id that is
// no token.
const char* tokenizer_decode(const Tokenizer* tk, int id, size_t* nbytes);

/* tokenizer_encode -- text -> at most `most` ids; returns their number, or -1 if a byte has no token.
 *
 * Byte pair encoding: the pair of neighbours whose union is the token of the lowest id becomes that token,
 * until none is left. GPT-2 numbers its tokens in the order of its merges, so this needs no list of them. Its
 * cutting of text into words before is left out: the ids differ from its own where an apostrophe opens a word
 * (10 of 605 lines of Shakespeare; nothing else did), never the text that they stand for. For prompts, not
 * for data: each merge looks through the whole vocabulary.
 */
int tokenizer_encode(const Tokenizer* tk, const char* text, int* ids, int most);

// Prints a token as llm.c does: a single byte only if it is printable or space; the id where there is no
// tokenizer.
void tokenizer_print(const Tokenizer* tk, int id, FILE* out);

#ifdef __cplusplus
}
#endif
#endif
