// lock.c -- see lock.h.
#include "train/lock.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// who has written into a lock that another process holds
static int held_by(int fd, const char* dir, char err[TRAIN_ERR]) {
    char text[96], host[65] = "", who[128] = "another process";
    const ssize_t n = pread(fd, text, sizeof text - 1, 0);
    int pid;
    text[n > 0 ? n : 0] = 0;
    if (sscanf(text, "%d %64s", &pid, host) == 2) {
        (void)snprintf(who, sizeof who, "process %d on %s", pid, host);
    }
    return train_error(err, "output folder %s: %s is writing into it; want another --out, or that to end",
                       dir, who);
}

// a holder that ended meanwhile has removed the file that was opened: the lock is on nothing
static int is_at(int fd, const char* path) {
    struct stat mine, there;
    return fstat(fd, &mine) == 0 && stat(path, &there) == 0 && mine.st_dev == there.st_dev &&
           mine.st_ino == there.st_ino;
}

static void sign(int fd) {
    char text[96], host[65] = "";
    (void)gethostname(host, sizeof host - 1);
    const int n = snprintf(text, sizeof text, "%d %s\n", (int)getpid(), host[0] ? host : "?");
    // for an error message alone, so nothing is said if it fails
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n) { return; }
}

int lock_take(FolderLock* lock, const char* dir, char err[TRAIN_ERR]) {
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    memset(lock, 0, sizeof *lock);
    err[0] = 0;
    (void)snprintf(lock->path, sizeof lock->path, "%s/train_gpt.lock", dir);
    for (int tries = 1; !lock->held; tries++) {
        const int fd = open(lock->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644);
        if (fd < 0) { return train_error(err, "%s: cannot be opened: %s", lock->path, strerror(errno)); }
        if (fcntl(fd, F_SETLK, &whole) != 0) {
            const int why = errno, taken = why == EACCES || why == EAGAIN;
            const int rc = taken ? held_by(fd, dir, err) : 0;
            if (!taken) { (void)train_error(err, "%s: cannot be locked: %s", lock->path, strerror(why)); }
            close(fd);
            return rc;
        }
        lock->held = is_at(fd, lock->path) || tries == 100;
        lock->fd = fd;
        if (!lock->held) { close(fd); }
    }
    sign(lock->fd);
    return 0;
}

void lock_release(FolderLock* lock) {
    if (!lock->held) { return; }
    (void)unlink(lock->path); // still locked: whoever opens the path now makes a file of its own
    close(lock->fd);
    lock->held = 0;
}
