/* lock.h -- one run at a time writes into an output folder.
 *
 * DIR/train_gpt.lock is locked (fcntl, which file systems over a network have, too) by the run's rank 0 for
 * as long as it lives, and names it. The kernel lets go of it when the process ends, however it ends; what is
 * left of the file then locks nothing. Tests: dev/test/test_checkpoint.c, dev/test/kill_test.py.
 */
#ifndef LOCK_H
#define LOCK_H
#include "train/logger.h" // TRAIN_ERR
#ifdef __cplusplus
extern "C" {
#endif

// all zero: none is held
typedef struct {
    int held, fd;
    char path[1024];
} FolderLock;

// 0, or -1 with err: another process has it, whose number and host are told. Where a file system has no locks
// none is taken, and err says so; else it is empty.
int lock_take(FolderLock* lock, const char* dir, char err[TRAIN_ERR]);
// and removes the file
void lock_release(FolderLock* lock);

#ifdef __cplusplus
}
#endif
#endif
