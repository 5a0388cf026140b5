/* schedule.h -- learning rate of each step: llm.c's four shapes, number for number. */
#ifndef SCHEDULE_H
#define SCHEDULE_H
#ifdef __cplusplus
extern "C" {
#endif

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } ScheduleKind;
#define SCHEDULE_NAMES "cosine|linear|constant|wsd" // in the order of ScheduleKind

typedef struct {
    ScheduleKind kind;
    float lr;             // the highest
    float final_fraction; // of lr, that is left after the last step
    int warmup;           // steps in which lr grows from lr/warmup to lr; constant has none
    int nsteps;
} Schedule;

/* schedule_lr -- learning rate of step 0, 1, ..., nsteps - 1.
 *
 * After the warmup: cosine and linear fall from lr to lr * final_fraction, which step nsteps would have; wsd
 * stays at lr until 80 % of the steps are done, then falls by the square root. Steps beyond nsteps have the
 * final rate.
 */
float schedule_lr(const Schedule* s, int step);

#ifdef __cplusplus
}
#endif
#endif
