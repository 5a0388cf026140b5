/* dataloader.h -- reads token shards, in llm.c's order number for number.
 *
 * Formats: doc/formats.md. A "process" is one that reads data of its own: the dp rank and the number of dp
 * ranks take the place of llm.c's rank and number of processes. Tests: dev/test/test_data.c. Errors are
 * those of the user's files: returned, never fatal.
 */
#ifndef DATALOADER_H
#define DATALOADER_H
#include "train/rng.h"
#include <stdio.h>
#ifdef __cplusplus
extern "C" {
#endif

#define DATA_ERR_NBYTES 256 // functions of data/ write at most so many bytes into err

typedef struct {
    char* path;
    size_t ntok;
    int width; // bytes of a token: 2 or 4
} DataShard;

typedef struct {
    int B, T;                        // one batch of this process: [B, T] tokens
    int process_rank, num_processes; // this process, and how many share the data
    int should_shuffle, seed;
    int V;            // every token read is below
    DataShard* shard; // [nshards], sorted by name
    size_t nshards;
    size_t ntok; // of all shards
    // where we are
    Rng rng;                   // of this process
    size_t epoch;              // from 0
    size_t current_shard_idx;  // position in the order of shards
    size_t current_sample_idx; // of the shard; a sample is one batch for all processes
    size_t shard_num_samples;  // samples in the current shard
    int* shard_indices;        // [nshards], the order of shards
    int* intra_shard_indices;  // [shard_num_samples], the order of samples; NULL unless should_shuffle
    // the current batch
    int* inputs;            // [B, T]
    int* targets;           // [B, T], inputs shifted by one token
    const char* batch_path; // shard it is from, and the place of its first token there
    size_t batch_first;
    void* buffer; // [B*T + 1] tokens as they lie in the file
    FILE* file;   // the current shard
} DataLoader;

/* dataloader_init -- opens all shards that match `pattern` and stands before the first batch.
 *
 * pattern  as a shell's, expanded here: the user quotes it. The header and the size of every shard are
 *          checked.
 * V        the vocabulary of the model; a token that is not below it is an error of the batch it is in.
 * Order    sorted by name; with should_shuffle, shards and the samples of each are shuffled in every epoch
 *          by a generator of seed `seed` + process_rank (llm.c: 42). A shard's tail that fills no sample is
 *          dropped.
 * Errors   -1 with one line in err: what is wrong with which file, the numbers, what would work. dl is then
 *          empty.
 */
int dataloader_init(DataLoader* dl, const char* pattern, int B, int T, int process_rank, int num_processes,
                    int should_shuffle, int seed, int V, char err[DATA_ERR_NBYTES]);
void dataloader_free(DataLoader* dl);

// Fills inputs and targets with the next batch; after the last shard the next epoch begins. 0, or -1 with
// err.
int dataloader_next_batch(DataLoader* dl, char err[DATA_ERR_NBYTES]);

// samples, one a batch of all processes, of all shards together
size_t dataloader_samples(const DataLoader* dl);

// Back to where dataloader_init left it. 0, or -1 with err.
int dataloader_reset(DataLoader* dl, char err[DATA_ERR_NBYTES]);

/* dataloader_seek -- goes to where process `rank` stands in shard number shard_idx of its order in an epoch,
 * after sample_idx samples of it; then every process has read as many batches of that epoch, each in its own
 * order.
 *
 * What was drawn for the order up to there is drawn again: the next batches are those of a run that was never
 * stopped. sample_idx beyond the shard's end is its end.
 * Errors   -1 with err: no such shard, or it cannot be opened; dl stands where it stood.
 */
int dataloader_seek(DataLoader* dl, int rank, size_t epoch, size_t shard_idx, size_t sample_idx,
                    char err[DATA_ERR_NBYTES]);

/* dataloader_save, dataloader_restore -- the position to and from bytes, so that a resumed run reads the
 * very batches that the stopped one would have read. One process' bytes serve all processes.
 *
 * Layout   doc/formats.md.
 * Note     With another B*T*num_processes a sample is another piece of a shard: restore goes to as many
 *          tokens of the shard, rounded down to a sample, returns 0 and says so in err, which else is empty.
 * Errors   restore: -1 with err when the bytes are not a position, or are that of other data, another
 *          should_shuffle or seed; dl stands where it stood.
 */
enum { DATA_STATE_NBYTES = 88 };
void dataloader_save(const DataLoader* dl, void* bytes);
int dataloader_restore(DataLoader* dl, const void* bytes, size_t nbytes, char err[DATA_ERR_NBYTES]);

// writes one line into err and returns -1: `return data_error(err, "...")`
int data_error(char err[DATA_ERR_NBYTES], const char* fmt, ...) __attribute__((format(printf, 2, 3)));
// Bytes that would break a line or command a terminal, as a file's name may have them, become '?'
void data_one_line(char* text);

/* data_open -- opens a regular file for reading and tells its size. NULL: why says the reason.
 *
 * Nothing else is opened: a pipe waits for somebody to write into it, and a device may have no end.
 */
FILE* data_open(const char* path, uint64_t* nbytes, const char** why);

// The first bytes of a file -> what it is, for error messages: "a model checkpoint", "an HTML page (...)";
// or NULL.
const char* data_file_kind(const void* head, size_t nbytes);
// The end of a path that is too long for an error message
const char* data_path_tail(const char* path);

#ifdef __cplusplus
}
#endif
#endif
