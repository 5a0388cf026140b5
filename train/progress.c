/* progress.c -- a progress bar. See progress.h. */
#include "train/progress.h"
#include "flashoverlap/fo.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { LINE_NBYTES = 512, LEAST_BAR = 10, MOST_BAR = 60 };
#define BETWEEN_S 0.1 // two drawings, so that short steps do not spend their time on a terminal

// COLUMNS, where it is set, goes before what the terminal says
static int terminal_width(void) {
    struct winsize size;
    const char* columns = getenv("COLUMNS");
    const int said = columns ? atoi(columns) : 0;
    if (said > 0) { return said; }
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// 45s, 12m05s, 3h07m, 2d03h
static void time_left(char* text, size_t nbytes, double seconds) {
    const long long s = (long long)(seconds + 0.5);
    if (seconds < 0.0) {
        (void)snprintf(text, nbytes, "?");
    } else if (s < 60) {
        (void)snprintf(text, nbytes, "%llds", s);
    } else if (s < 3600) {
        (void)snprintf(text, nbytes, "%lldm%02llds", s / 60, s % 60);
    } else if (s < 86400) {
        (void)snprintf(text, nbytes, "%lldh%02lldm", s / 3600, s / 60 % 60);
    } else {
        (void)snprintf(text, nbytes, "%lldd%02lldh", s / 86400, s / 3600 % 24);
    }
}

char* progress_line(char* text, int nbytes, int width, int done, int nsteps, double left_s) {
    char left[32], said[128];
    const double share = nsteps > 0 ? (double)done / nsteps : 1.0;
    time_left(left, sizeof left, left_s);
    const int n = snprintf(said, sizeof said, "%d/%d %3.0f%% %s left", done, nsteps, 100.0 * share, left);
    int bar =
        width - 1 - n - 3; // of its brackets and the blank; a terminal may wrap what fills its last column
    bar = bar > MOST_BAR ? MOST_BAR : bar;
    if (bar < LEAST_BAR || bar + n + 4 > nbytes) {
        (void)snprintf(text, (size_t)(width < nbytes ? width : nbytes), "%s", said);
        return text;
    }
    const int full = (int)(share * bar);
    text[0] = '[';
    memset(text + 1, '.', (size_t)bar);
    memset(text + 1, '#', (size_t)full);
    (void)snprintf(text + 1 + bar, (size_t)(nbytes - 1 - bar), "] %s", said);
    return text;
}

void progress_init(Progress* p, int wanted, int first_step, int nsteps) {
    const char* term = getenv("TERM");
    memset(p, 0, sizeof *p);
    p->on = wanted && isatty(STDOUT_FILENO) && !(term && strcmp(term, "dumb") == 0);
    p->first = first_step, p->nsteps = nsteps;
}

void progress_draw(Progress* p, int step) {
    char text[LINE_NBYTES];
    const double now = fo_now();
    const int measured = step - p->first - 1;
    if (!p->on) { return; }
    if (measured == 0) { p->start_s = now; }
    if (now - p->drawn_s < BETWEEN_S) { return; }
    const double left = measured > 0 ? (now - p->start_s) / measured * (p->nsteps - step) : -1.0;
    printf("\r\033[K%s\n", progress_line(text, sizeof text, terminal_width(), step, p->nsteps, left));
    fflush(stdout);
    p->shown = 1, p->drawn_s = now;
}

void progress_clear(Progress* p) {
    if (!p->shown) { return; }
    printf("\033[A\r\033[K"); // up to the line of the bar, which what is printed next takes
    fflush(stdout);           // stderr, too
    p->shown = 0;
}
