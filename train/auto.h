/* auto.h -- --overlap auto: into how many sub-chunks flash cuts each operation, by rates measured at the
 * start.
 */
#ifndef AUTO_H
#define AUTO_H
#include "train/gpt.h"
#ifdef __cplusplus
extern "C" {
#endif

// of each operation that is cut into chunks
typedef struct {
    int P[NSITES], m[NSITES]; // ranks, 0: there was nothing to choose; sub-chunks
    double exposed_s[NSITES]; // what a call will leave exposed, as predicted
    double plain_s[NSITES];   // what its plain collective takes
} AutoChoice;

/* auto_choose -- measures what each rank computes under each operation, on all ranks at the same time, and
 * makes the plans with the m that fo_model_chunks finds best for the slowest of them.
 *
 * g        as gpt_open has made it with an overlap of m 0, for training; pace and link are as they will be
 *          (fo_device_pace; fo_group_link or fo_group_measure). Its activations are written over, no others.
 * Returns  what is expected of the choice, the same on all ranks.
 * Ranks    collective over the world; waits. Nothing may be under way.
 */
AutoChoice auto_choose(GPT* g, const TrainOptions* opt);

// on stdout, by one rank: operations of each m, with their milliseconds; what choosing took. begin: of a line
void auto_print(const AutoChoice* c, double seconds, const char* begin);

#ifdef __cplusplus
}
#endif
#endif
