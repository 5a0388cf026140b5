/* logger.h -- main.log, line for line as llm.c writes it, and the one-line messages of train/. */
#ifndef LOGGER_H
#define LOGGER_H
#ifdef __cplusplus
extern "C" {
#endif

#define TRAIN_ERR 512 // bytes of a message; longer ones are cut

// writes one line into err and returns -1: `return train_error(err, "...")`
int train_error(char err[TRAIN_ERR], const char* fmt, ...) __attribute__((format(printf, 2, 3)));

/* Logger -- appends to DIR/main.log, which is opened for each line: it is complete whenever someone looks.
 *
 * A step is counted from 0: the line of s is the step printed as s+1, as llm.c has it. An empty path writes
 * nothing (no output folder, or a rank other than 0). All functions return 0, or -1 with the reason in err.
 */
typedef struct {
    char path[1024];
} Logger;

// dir NULL or "": no log. resume 0: an old main.log is wiped; 1: kept, and appended to
int logger_init(Logger* l, const char* dir, int rank, int resume, char err[TRAIN_ERR]);
int logger_train(const Logger* l, int step, float loss, float lr, float norm, char err[TRAIN_ERR]);
int logger_val(const Logger* l, int step, float loss, char err[TRAIN_ERR]);

#ifdef __cplusplus
}
#endif
#endif
