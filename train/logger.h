/* logger.h -- main.log, line for line as llm.c writes it, the same and more as JSON lines, and the one-line
 * messages of train/. What the lines hold: doc/logs.md.
 */
#ifndef LOGGER_H
#define LOGGER_H
#ifdef __cplusplus
extern "C" {
#endif

#define TRAIN_ERR 512 // bytes of a message; longer ones are cut

// writes one line into err and returns -1: `return train_error(err, "...")`
int train_error(char err[TRAIN_ERR], const char* fmt, ...) __attribute__((format(printf, 2, 3)));

/* Logger -- appends to DIR/main.log and to the file of --log-json, which are opened for each line: they are
 * complete whenever someone looks.
 *
 * A step is counted from 0: the line of s is the step printed as s+1, as llm.c has it. An empty path writes
 * nothing (no output folder, or a rank other than 0). All functions return 0, or -1 with the reason in err.
 */
typedef struct {
    char path[1024], json[1024];
} Logger;

// what is logged of a step; the JSON line has all of it
typedef struct {
    int step;
    float loss, norm, lr;
    double loss_z, norm_z, ms, mfu, tok_s, comm_ms, exposed_ms; // mfu: 1 is the peak
    double tokens;                                              // of all steps up to here
    const char* const* op; // names, and what rank 0 stood waiting for them
    const double* op_ms;
    int nops;
    // operations, and into how many sub-chunks --overlap auto cuts them: of the first step of a run
    const char* const* chosen;
    const int* chosen_m;
    int nchosen;
} LogStep;

// dir, json NULL or "": no such log. resume 0: old ones are wiped; 1: kept, and appended to
int logger_init(Logger* l, const char* dir, const char* json, int rank, int resume, char err[TRAIN_ERR]);
int logger_train(const Logger* l, const LogStep* s, char err[TRAIN_ERR]);
int logger_val(const Logger* l, int step, float loss, char err[TRAIN_ERR]);
int logger_eval(const Logger* l, int step, float accuracy, char err[TRAIN_ERR]);

#ifdef __cplusplus
}
#endif
#endif
