/* progress.h -- how far a run is and how long it will take, one line at the bottom of a terminal. */
#ifndef PROGRESS_H
#define PROGRESS_H
#ifdef __cplusplus
extern "C" {
#endif

/* Progress -- where stdout is no terminal, nothing is ever written: files and pipes get plain lines.
 *
 * The line stands only while a step is computed: progress_clear takes it away before anything else is
 * printed, and the cursor waits below it, so that an error of another thread is readable. All zeros: no bar.
 */
typedef struct {
    int on, shown;
    int first, nsteps;
    double start_s,
        drawn_s; // when the second step of the run began: the first one is no measure; the last drawing
} Progress;

// wanted 0: no bar, whatever stdout is (a rank other than 0; processes, whose launcher gathers what they
// print)
void progress_init(Progress* p, int wanted, int first_step, int nsteps);
// before step `step`, from 0, is computed
void progress_draw(Progress* p, int step);
void progress_clear(Progress* p);

/* progress_line -- the text: bar, steps done, percent, time left (below 0: not yet known), as wide as `width`
 * allows; too narrow for a bar, it has none. Returns text.
 */
char* progress_line(char* text, int nbytes, int width, int done, int nsteps, double left_s);

#ifdef __cplusplus
}
#endif
#endif
