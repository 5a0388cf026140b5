/* checkpoint.h -- a training run on disk: model, optimizer state, and which of them are complete.
 *
 *   OUT/model_%08d.bin  the model after so many steps, in llm.c's format: its tools read it
 *   OUT/state_%08d.bin  what a resume needs beside it: m, v, fp32 masters, place in the data, scalars
 *   OUT/DONE_%08d       empty; written last: both are complete
 *
 * Formats: doc/formats.md. Files hold whole tensors: the same bytes whatever mesh wrote them, and any mesh
 * reads them. ts, os: a rank's tables (tensors.h), of its whole parts and of what it holds of the optimizer's
 * arrays. A file is written under another name and renamed when every byte is on disk, so an older one
 * survives a full disk. Errors are the user's: -1 with one line in err. Tests: dev/test/test_checkpoint.c.
 */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H
#include "flashoverlap/fo_comm.h"
#include "train/lock.h"
#include "train/logger.h" // TRAIN_ERR
#include "train/tensors.h"
#ifdef __cplusplus
extern "C" {
#endif

#define CHECKPOINT_PATH 1024 // bytes of a path

// Are these sizes a GPT's? Positive, not absurd, NH divides C, Vp is V rounded up to a multiple of 128.
// Returns 0, or -1.
int config_check(const GPTConfig* c, char err[TRAIN_ERR]);

// V rounded up to a multiple of 128
static inline int config_padded(int V) {
    return (V + 127) / 128 * 128;
}

// ---- model ------------------------------------------------------------------------------------------------
/* checkpoint_read_header -- the sizes in a model file, after checking all that can be checked without the
 * weights: magic, version, sizes, and that the file is as long as they say. version 3: fp32, 5: bf16.
 */
int checkpoint_read_header(const char* path, GPTConfig* c, int* version, char err[TRAIN_ERR]);

/* checkpoint_read_model -- this rank's parts of a model file, version 3 or 5.
 *
 * params   rounded, [ts->nelem]; NULL: none. master: fp32, [os->nelem]; NULL: none. Device memory, which s
 *          has passed on return; or host memory, where s is NULL. Gaps between tensors become 0. In an FP32
 *          build the two may be the same memory if ts and os are of the same cuts
 * Ranks    read on their own, block by block: no rank holds a whole tensor. The file's sizes must be those
 *          of ts and os.
 */
int checkpoint_read_model(const char* path, const Tensors* ts, floatX* params, const Tensors* os,
                          float* master, FoStream* s, char err[TRAIN_ERR]);

/* checkpoint_write_model -- all ranks' parts become one model file, of version 5 (FP32 builds: 3).
 *
 * params   this rank's arena, [ts->nelem], device memory, complete: nothing that writes it is queued any more
 * g        all ranks: rank w is tp rank w % tp of replica w / tp. Any number of replicas that ts' shards, if
 *          there are some, do not exceed
 * Order    queued on comm and waited for. Rank 0 writes; ranks hold a few MB at a time.
 * Ranks    collective; all return the same, with rank 0's err.
 * Errors   the file cannot be created or written (disk full): the unfinished file is removed, an old one is
 *          as it was.
 */
int checkpoint_write_model(const char* path, const Tensors* ts, const floatX* params, FoGroup* g,
                           FoStream* comm, char err[TRAIN_ERR]);

// ---- optimizer state --------------------------------------------------------------------------------------
/* CheckpointState -- everything in a state file but the three big arrays. The two blobs are bytes to this
 * file: the data loader's place (dataloader_save), and what the training loop wants to find again (its
 * detectors of unusual losses and norms).
 */
typedef struct {
    int step; // updates done
    void *loader, *trainer;
    size_t loader_nbytes, trainer_nbytes;
} CheckpointState;

// collective, as checkpoint_write_model; m, v and master are [os->nelem], device memory. What st holds is
// rank 0's.
int checkpoint_write_state(const char* path, const Tensors* os, const CheckpointState* st, const float* m,
                           const float* v, const float* master, FoGroup* g, FoStream* comm,
                           char err[TRAIN_ERR]);

/* checkpoint_read_state -- st, and this rank's parts: m, v and master [os->nelem], and the masters rounded,
 * params [ts->nelem], as in checkpoint_read_model. Device memory; s has passed it on return.
 *
 * Ranks read on their own. The file's sizes must be those of os. Afterwards checkpoint_state_free(st), also
 * on error.
 */
int checkpoint_read_state(const char* path, CheckpointState* st, const Tensors* ts, floatX* params,
                          const Tensors* os, float* m, float* v, float* master, FoStream* s,
                          char err[TRAIN_ERR]);
void checkpoint_state_free(CheckpointState* st); // of one that was read

// ---- llm.c's optimizer state ------------------------------------------------------------------------------
// where rank 0 of a run of llm.c stood in its data: which epoch, and its -b and -t, it does not store
typedef struct {
    int nproc, should_shuffle;
    size_t shard_idx, sample_idx;
} LlmcPosition;

/* checkpoint_import_llmc -- what a run of llm.c left after `step` updates: model_%08d.bin and, of each of its
 * ranks, state_%08d_%05d.bin, without ZeRO (-z 0) or with (-z 1).
 *
 * As checkpoint_read_state; any mesh may take over from any number of llm.c's ranks. Without masters (-w 0)
 * they are the model file's values.
 * Note     err says what is lost: with shuffled data, the epoch. Otherwise it is empty. dataloader_seek goes
 *          to the position (rank 0, epoch 0): with llm.c's -b, -t and number of ranks the very one.
 * Errors   -1, one line that names the file: of a rank, and missing; truncated; of another step, rank, number
 *          of ranks; of another model.
 */
int checkpoint_import_llmc(const char* dir, int step, LlmcPosition* position, const Tensors* ts,
                           floatX* params, const Tensors* os, float* m, float* v, float* master, FoStream* s,
                           char err[TRAIN_ERR]);

// has this step states of llm.c's ranks, and none of this program's?
int checkpoint_is_llmc(const char* dir, int step);

// ---- output folder ----------------------------------------------------------------------------------------
// makes the folder (mode 0755) if it is missing, tries whether files can be made in it, locks it for this run
// (lock.h) and deletes what a killed one has left half written
int checkpoint_prepare_folder(const char* dir, FolderLock* lock, char err[TRAIN_ERR]);

// "DIR/model_00000020.bin" and so on. Folders' names are short enough: checkpoint_prepare_folder checks it.
void checkpoint_path(char path[CHECKPOINT_PATH], const char* dir, const char* kind, int step);
void checkpoint_done_path(char path[CHECKPOINT_PATH], const char* dir, int step);

// marks a step complete, after both of its files are on disk. Rank 0, and after every rank's writing has
// returned 0
int checkpoint_write_done(const char* dir, int step, char err[TRAIN_ERR]);

/* checkpoint_find -- the newest step that has a DONE file, a model and a state file (or those of llm.c's
 * ranks), all sound as far as headers and lengths tell. -1: none. err says which were passed over, and why;
 * else it is empty.
 */
int checkpoint_find(const char* dir, char err[TRAIN_ERR]);

/* checkpoint_remove -- deletes what there is of a step's checkpoint, DONE first. Rank 0: before it writes
 * one, so that an earlier run's is never mixed with it, and if that fails.
 */
int checkpoint_remove(const char* dir, int step, char err[TRAIN_ERR]);

/* checkpoint_prune -- keeps the `keep` newest checkpoints of steps up to `step`, and those of a multiple of
 * `major` (0: of none); deletes the other ones up to `step`, DONE last. keep 0: keeps all. Rank 0.
 */
int checkpoint_prune(const char* dir, int step, int keep, int major, char err[TRAIN_ERR]);

// ---- debug state ------------------------------------------------------------------------------------------
// what PyTorch computed for one batch, for tests
typedef struct {
    int B, T;
    int *x, *y;    // [B, T]
    float* logits; // [B, T, V], not padded
    float loss;
    float* grads; // 16 whole tensors as in a model file, wte padded to Vp
} DebugState;

// c: the model it belongs to. Afterwards debugstate_free(d), also on error.
int debugstate_read(const char* path, const GPTConfig* c, DebugState* d, char err[TRAIN_ERR]);
void debugstate_free(DebugState* d);

#ifdef __cplusplus
}
#endif
#endif
