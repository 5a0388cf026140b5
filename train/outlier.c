// outlier.c -- z-score in a sliding window, by running sums. See outlier.h.
#include "train/outlier.h"
#include <math.h>

double outlier_update(OutlierDetector* d, double x) {
    if (!isfinite(x)) { return (double)NAN; }
    const int full = d->nvalues == OUTLIER_WINDOW;
    const double old = full ? d->window[d->next] : 0.0;
    d->sum += x - old;
    d->sum_squares += x * x - old * old;
    d->window[d->next] = x;
    d->next = (d->next + 1) % OUTLIER_WINDOW;
    if (!full) {
        d->nvalues++;
        return (double)NAN;
    }
    const double mean = d->sum / OUTLIER_WINDOW;
    const double variance = d->sum_squares / OUTLIER_WINDOW - mean * mean;
    // cancellation can leave a variance of nothing but rounding, or below 0, where all values are equal
    return variance > 1e-14 * mean * mean ? (x - mean) / sqrt(variance) : 0.0;
}

int outlier_is_sound(const OutlierDetector* d) {
    return d->nvalues >= 0 && d->nvalues <= OUTLIER_WINDOW && d->next >= 0 && d->next < OUTLIER_WINDOW;
}
