/* bench.h -- what the benches of schedules share: modes by name, figures and their spread, the load of
 * the machine, numbers of a command line, JSON, and when a machine is too noisy for a verdict.
 */
#ifndef BENCH_H
#define BENCH_H
#include "flashoverlap/fo_comm.h"
#include "flashoverlap/fo_plan.h"
#include <stdio.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { BENCH_MAX_MODES = 16, BENCH_MAX_ROUNDS = 200, BENCH_NOISY = 3 }; // NOISY: exit status

typedef struct {
    char name[24]; // as on the command line
    FoMode mode;
    int m; // 0: auto
    FoTopology topology;
    int row;  // attention: row-parallel flash, all QKV, then all attention before the first projection
    int free; // on a link that costs nothing
} BenchMode;

typedef enum { BENCH_LAYER, BENCH_ATTENTION, BENCH_STEP } BenchWhat; // what is measured

/* bench_modes -- modes from names with commas between them: none, slice:M, flash:M (direct), ring:M (flash
 * along a ring); of attention's forward pass row:M, too; of steps auto (flash, each operation cut as auto
 * chooses) and free (flash:2 on a free link). Returns how many; what is wrong ends the program.
 */
int bench_modes(BenchMode modes[BENCH_MAX_MODES], const char* list, BenchWhat what);
// place of the mode of that name, or -1
int bench_find(const BenchMode modes[], int n, const char* name);

// ---- figures ----------------------------------------------------------------------------------------------
typedef struct {
    double median, p25, p75;
} BenchSpread;

double bench_quantile(const double* v, int n, double q); // of n values, BENCH_MAX_ROUNDS at most
BenchSpread bench_spread(const double* v, int n);
double bench_mean(const double* v, int n);
double bench_largest(const double* v, int n);
double bench_least(const double* v, int n);

typedef struct {
    double now, machine, own; // seconds; CPU seconds of all cores, of this process
} BenchLoad;
BenchLoad bench_load(void);
// cores that others kept busy between two, in which this program used `own` CPU seconds
double bench_foreign(BenchLoad before, BenchLoad after, double own);
// exit status of two verdicts: 1 (failed) before BENCH_NOISY before 0
int bench_worse(int status, int other);

#define BENCH_MOST_SPREAD  0.15 // of the wall time: (p75 - p25) / median
#define BENCH_MOST_FOREIGN 0.5  // cores
/* Is it too noisy for a verdict? Then a line that begins with "too noisy" is printed, with the values.
 * Foreign load alone is an excuse for what failed, and no reason to doubt what holds.
 */
int bench_noisy(const char* what, double spread, double foreign_cores, int failed);

// ---- the command line -------------------------------------------------------------------------------------
// Ends the program with the user's error and status 1. Of processes that found the same error one tells it.
void bench_refuse(const char* fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
long bench_long(const char* option, const char* text, long low, long high);
// rest: a comma must follow, and *rest becomes what is behind it; NULL: nothing may follow
double bench_double(const char* option, const char* text, double low, double high, const char** rest);

// the first lines of a table's head: date, cores, system; then the device
void bench_print_machine(const char* device);

// ---- JSON -------------------------------------------------------------------------------------------------
// Written to a temporary name, renamed when it is closed. One that was not opened (no path) takes everything
// and writes nothing.
typedef struct {
    FILE* f;
    int comma; // something stands before in the object or array at hand
    char path[1024], temporary[1040];
} BenchJson;

// path NULL: none. Ends the program if the file cannot be written; it is made by bench_json_head
void bench_json_open(BenchJson* j, const char* path);
// program, date, machine, command, device, and the beginning of "tables"
void bench_json_head(BenchJson* j, const char* program, int argc, char** argv, const char* device);
void bench_json_begin(BenchJson* j, const char* key, char bracket); // '{' or '['; key NULL in an array
void bench_json_end(BenchJson* j, char bracket);                    // '}' or ']'
void bench_json_text(BenchJson* j, const char* key, const char* value);
void bench_json_number(BenchJson* j, const char* key, double value); // not finite: null
// NAME_ms, NAME_p25, NAME_p75
void bench_json_spread(BenchJson* j, const char* name, BenchSpread s);
/* bench_json_mode -- begins a mode's object with its figures, against mode none, NAN where there is none.
 * bench_json_end follows. total: of the wall clock; NULL: it has none of its own.
 */
void bench_json_mode(BenchJson* j, const char* name, const BenchSpread* total, BenchSpread exposed,
                     double vs_none_percent, double hidden_percent, double predicted_ms);
// ends the tables and the file
void bench_json_close(BenchJson* j);

#ifdef __cplusplus
}
#endif
#endif
