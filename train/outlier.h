// outlier.h -- how unusual a value is among the last 128: the z-scores of loss and gradient norm, as llm.c
#ifndef OUTLIER_H
#define OUTLIER_H
#ifdef __cplusplus
extern "C" {
#endif

#define OUTLIER_WINDOW 128

// Zero-initialised is valid and empty. No pointers: a checkpoint stores it as it is.
typedef struct {
    double window[OUTLIER_WINDOW];
    double sum, sum_squares;
    int nvalues, next; // values in the window; where the next one goes
} OutlierDetector;

/* outlier_update -- takes x into the window and returns its z-score there: (x - mean) / standard deviation.
 *
 * NaN until the window has been filled by 128 earlier values; 0 when all of them are equal. A value that is
 * not finite is not taken in (the sums would never recover from it) and has z-score NaN.
 */
double outlier_update(OutlierDetector* d, double x);

// Can these bytes, read from a file, be a detector?
int outlier_is_sound(const OutlierDetector* d);

#ifdef __cplusplus
}
#endif
#endif
