/* report.h -- the table at the start of a run, as llm.c prints it: two columns, 21 and 50 characters wide. */
#ifndef REPORT_H
#define REPORT_H
#include "train/options.h"
#ifdef __cplusplus
extern "C" {
#endif

void report_row(const char* name, const char* fmt, ...) __attribute__((format(printf, 2, 3)));
void report_rule(void);
// what the command line says, between two rules
void report_options(const TrainOptions* opt);

#ifdef __cplusplus
}
#endif
#endif
