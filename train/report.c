/* report.c -- the table at the start of a run. */
#include "train/report.h"
#include <stdarg.h>

void report_row(const char* name, const char* fmt, ...) {
    char value[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(value, sizeof value, fmt, ap);
    va_end(ap);
    printf("| %-21s | %-50s |\n", name, value);
}

void report_rule(void) {
    printf("+-----------------------+----------------------------------------------------+\n");
}

void report_options(const TrainOptions* opt) {
    report_rule();
    report_row("Parameter", "Value");
    report_rule();
    report_row("train data pattern", "%s", opt->train_data);
    report_row("val data pattern", "%s", opt->val_data);
    report_row("output log dir", "%s", opt->out[0] ? opt->out : "NULL");
    report_row("checkpoint_every", "%d", opt->checkpoint_every);
    report_row("resume", "%d", opt->resume);
    report_row("micro batch size B", "%d", opt->batch);
    report_row("sequence length T", "%d", opt->seq_len);
    report_row("total batch size", "%d", opt->total_batch);
    report_row("learning rate (LR)", "%e", (double)opt->lr);
    report_row("warmup iterations", "%d", opt->warmup);
    report_row("final LR fraction", "%e", (double)opt->final_lr_fraction);
    report_row("weight decay", "%e", (double)opt->weight_decay);
    report_row("max_steps", "%d", opt->max_steps);
    report_row("val_loss_every", "%d", opt->val_every);
    report_row("val_max_steps", "%d", opt->val_batches);
    report_row("run hellaswag", "%s", opt->hellaswag ? "yes" : "no");
    report_row("sample_every", "%d", opt->sample_every);
    report_row("genT", "%d", opt->sample_length);
    report_row("overfit_single_batch", "%d", opt->overfit);
    report_rule();
}
