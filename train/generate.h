/* generate.h -- text from the model, on the ranks it is trained on. */
#ifndef GENERATE_H
#define GENERATE_H
#include "train/run.h"
#ifdef __cplusplus
extern "C" {
#endif
void generate(Trainer* tr, int (*stopping)(void* gpt));
#ifdef __cplusplus
}
#endif
#endif
