// bench.c -- see bench.h
#include "dev/bench/bench.h"
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

// ---- modes ------------------------------------------------------------------------------------------------
static const struct {
    const char* stem;
    int number; // a number follows
    BenchMode mode;
} KNOWN[] = {
    {"none", 0, {"", FO_NONE, 1, FO_DIRECT, 0, 0}},   {"slice", 1, {"", FO_SLICE, 1, FO_DIRECT, 0, 0}},
    {"flash", 1, {"", FO_FLASH, 1, FO_DIRECT, 0, 0}}, {"ring", 1, {"", FO_FLASH, 1, FO_RING, 0, 0}},
    {"row", 1, {"", FO_FLASH, 1, FO_DIRECT, 1, 0}},   {"free", 0, {"", FO_FLASH, 2, FO_DIRECT, 0, 1}},
    {"auto", 0, {"", FO_FLASH, 0, FO_DIRECT, 0, 0}}};
enum { NKNOWN = sizeof KNOWN / sizeof *KNOWN };

static BenchMode mode_of(const char* name, BenchWhat what) {
    const char* colon = strchr(name, ':');
    const size_t stem = colon ? (size_t)(colon - name) : strlen(name);
    for (int i = 0; i < NKNOWN; i++) {
        BenchMode mode = KNOWN[i].mode;
        if (strlen(KNOWN[i].stem) != stem || strncmp(name, KNOWN[i].stem, stem) != 0) { continue; }
        if (KNOWN[i].number != (colon != NULL) || (mode.row && what != BENCH_ATTENTION) ||
            ((mode.free || mode.m == 0) && what != BENCH_STEP)) {
            break;
        }
        if (colon) { mode.m = (int)bench_long("--modes", colon + 1, 1, FO_MAX_M); }
        (void)snprintf(mode.name, sizeof mode.name, "%s", name);
        return mode;
    }
    bench_refuse("--modes %s: want none, slice:M, flash:M, ring:M%s", name,
                 what == BENCH_STEP        ? ", auto, free"
                 : what == BENCH_ATTENTION ? ", row:M"
                                           : "; row:M is of attention's forward pass alone");
}

int bench_modes(BenchMode modes[BENCH_MAX_MODES], const char* list, BenchWhat what) {
    int n = 0;
    for (const char* s = list; *s;) {
        char name[sizeof modes[0].name];
        const size_t nbytes = strcspn(s, ",");
        if (n == BENCH_MAX_MODES) { bench_refuse("--modes %s: more than %d", list, BENCH_MAX_MODES); }
        if (nbytes == 0 || nbytes >= sizeof name) {
            bench_refuse("--modes %s: want names with a comma between two", list);
        }
        memcpy(name, s, nbytes);
        name[nbytes] = 0;
        modes[n] = mode_of(name, what);
        if (bench_find(modes, n, name) >= 0) {
            bench_refuse("--modes %s: %s stands there twice", list, name);
        }
        n++;
        s += nbytes + (s[nbytes] == ',');
    }
    if (n == 0) { bench_refuse("--modes '': want a list such as none,slice:4,flash:1"); }
    return n;
}

int bench_find(const BenchMode modes[], int n, const char* name) {
    for (int i = 0; i < n; i++) {
        if (strcmp(modes[i].name, name) == 0) { return i; }
    }
    return -1;
}

// ---- figures ----------------------------------------------------------------------------------------------
static int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

double bench_quantile(const double* v, int n, double q) {
    double sorted[BENCH_MAX_ROUNDS];
    memcpy(sorted, v, (size_t)n * sizeof *v);
    qsort(sorted, (size_t)n, sizeof *sorted, compare_doubles);
    return sorted[(int)(q * (n - 1) + 0.5)];
}

BenchSpread bench_spread(const double* v, int n) {
    BenchSpread s = {bench_quantile(v, n, 0.5), bench_quantile(v, n, 0.25), bench_quantile(v, n, 0.75)};
    return s;
}

double bench_mean(const double* v, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        sum += v[i];
    }
    return sum / n;
}

double bench_largest(const double* v, int n) {
    double x = v[0];
    for (int i = 1; i < n; i++) {
        x = v[i] > x ? v[i] : x;
    }
    return x;
}

double bench_least(const double* v, int n) {
    double x = v[0];
    for (int i = 1; i < n; i++) {
        x = v[i] < x ? v[i] : x;
    }
    return x;
}

BenchLoad bench_load(void) {
    BenchLoad l = {fo_now(), 0.0, 0.0};
    double v[7] = {0}; // user nice system idle iowait irq softirq
    FILE* f = fopen("/proc/stat", "r");
    if (f && fscanf(f, "cpu %lf %lf %lf %lf %lf %lf %lf", v, v + 1, v + 2, v + 3, v + 4, v + 5, v + 6) == 7) {
        l.machine = (v[0] + v[1] + v[2] + v[5] + v[6]) / (double)sysconf(_SC_CLK_TCK);
    }
    if (f) { fclose(f); }
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    l.own = (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
            1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    return l;
}

double bench_foreign(BenchLoad before, BenchLoad after, double own) {
    const double cores = (after.machine - before.machine - own) / (after.now - before.now);
    return cores > 0.0 ? cores : 0.0;
}

int bench_worse(int status, int other) {
    return other == 1 || status == 0 ? other : status;
}

int bench_noisy(const char* what, double spread, double foreign_cores, int failed) {
    if (spread <= BENCH_MOST_SPREAD && (!failed || foreign_cores <= BENCH_MOST_FOREIGN)) { return 0; }
    printf(
        "too noisy for a verdict on %s: wall time spreads by %.1f %% (at most %.0f %%), other processes kept "
        "%.2f cores busy (at most %.1f)\n",
        what, 100.0 * spread, 100.0 * BENCH_MOST_SPREAD, foreign_cores, BENCH_MOST_FOREIGN);
    return 1;
}

// ---- the command line -------------------------------------------------------------------------------------
void bench_refuse(const char* fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (!fo_launch_speaks()) { sleep(5); } // the launcher ends us when the one that speaks has ended
    fo_quit(1, "%s", text);
}

long bench_long(const char* option, const char* text, long low, long high) {
    char* end;
    errno = 0;
    const long v = strtol(text, &end, 10);
    if (errno || end == text || *end || v < low || v > high) {
        bench_refuse("%s %s: want a whole number from %ld to %ld", option, text, low, high);
    }
    return v;
}

double bench_double(const char* option, const char* text, double low, double high, const char** rest) {
    char* end;
    const double v = strtod(text, &end);
    if (end == text || (rest ? *end != ',' : *end != 0) || !(v >= low && v <= high)) {
        bench_refuse("%s %s: want %s from %g to %g", option, text,
                     rest ? "two numbers with a comma, the first" : "a number", low, high);
    }
    if (rest) { *rest = end + 1; }
    return v;
}

static void machine_line(char* text, size_t nbytes) {
    struct utsname u;
    uname(&u);
    (void)snprintf(text, nbytes, "%ld cores, %s %s", sysconf(_SC_NPROCESSORS_ONLN), u.sysname, u.release);
}

static void date_line(char text[32]) {
    const time_t now = time(NULL);
    strftime(text, 32, "%Y-%m-%d", localtime(&now));
}

void bench_print_machine(const char* device) {
    char machine[256], date[32];
    machine_line(machine, sizeof machine);
    date_line(date);
    printf("# %s, %s: %s\n", date, machine, device);
}

// ---- JSON -------------------------------------------------------------------------------------------------
void bench_json_open(BenchJson* j, const char* path) {
    memset(j, 0, sizeof *j);
    if (!path) { return; }
    if ((size_t)snprintf(j->path, sizeof j->path, "%s", path) >= sizeof j->path) {
        bench_refuse("--json: a path of more than %zu bytes", sizeof j->path - 1);
    }
    (void)snprintf(j->temporary, sizeof j->temporary, "%s.tmp", path);
    // now, not after a minute of measuring; and nothing lies there until then
    struct stat s;
    const int is_folder = stat(path, &s) == 0 && S_ISDIR(s.st_mode);
    FILE* f = path[0] && !is_folder ? fopen(j->temporary, "w") : NULL;
    if (!f || fclose(f) != 0 || remove(j->temporary) != 0) {
        bench_refuse("--json %s: %s", path[0] ? path : "''",
                     path[0] ? strerror(is_folder ? EISDIR : errno) : "want a file's name");
    }
}

static void json_quoted(FILE* f, const char* s) {
    (void)fputc('"', f);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') {
            fprintf(f, "\\%c", *s);
        } else if ((unsigned char)*s < ' ') {
            fprintf(f, "\\u%04x", *s);
        } else {
            (void)fputc(*s, f);
        }
    }
    (void)fputc('"', f);
}

// a comma if one is due, and the key
static void json_key(BenchJson* j, const char* key) {
    fprintf(j->f, "%s", j->comma ? ", " : "");
    if (key) { fprintf(j->f, "\"%s\": ", key); }
    j->comma = 1;
}

void bench_json_begin(BenchJson* j, const char* key, char bracket) {
    if (!j->f) { return; }
    json_key(j, key);
    fprintf(j->f, "%s%c", bracket == '{' ? "\n" : "", bracket);
    j->comma = 0;
}

void bench_json_end(BenchJson* j, char bracket) {
    if (!j->f) { return; }
    (void)fputc(bracket, j->f);
    j->comma = 1;
}

void bench_json_text(BenchJson* j, const char* key, const char* value) {
    if (!j->f) { return; }
    json_key(j, key);
    json_quoted(j->f, value);
}

void bench_json_number(BenchJson* j, const char* key, double value) {
    if (!j->f) { return; }
    json_key(j, key);
    if (isfinite(value)) {
        fprintf(j->f, "%.9g", value);
    } else {
        fprintf(j->f, "null");
    }
}

void bench_json_spread(BenchJson* j, const char* name, BenchSpread s) {
    const double values[] = {s.median, s.p25, s.p75};
    const char* const ends[] = {"ms", "p25", "p75"};
    for (int i = 0; i < 3; i++) {
        char key[48];
        (void)snprintf(key, sizeof key, "%s_%s", name, ends[i]);
        bench_json_number(j, key, values[i]);
    }
}

void bench_json_mode(BenchJson* j, const char* name, const BenchSpread* total, BenchSpread exposed,
                     double vs_none_percent, double hidden_percent, double predicted_ms) {
    bench_json_begin(j, NULL, '{');
    bench_json_text(j, "mode", name);
    if (total) {
        bench_json_spread(j, "total", *total);
        bench_json_number(j, "vs_none_percent", vs_none_percent);
    }
    bench_json_spread(j, "exposed", exposed);
    bench_json_number(j, "hidden_percent", hidden_percent);
    bench_json_number(j, "predicted_ms", predicted_ms);
}

void bench_json_head(BenchJson* j, const char* program, int argc, char** argv, const char* device) {
    if (!j->path[0]) { return; }
    j->f = fopen(j->temporary, "w");
    if (!j->f) { bench_refuse("--json %s: %s", j->path, strerror(errno)); }
    char machine[256], date[32], command[4096] = "";
    size_t used = 0;
    machine_line(machine, sizeof machine);
    date_line(date);
    for (int i = 0; i < argc && used < sizeof command; i++) {
        used += (size_t)snprintf(command + used, sizeof command - used, "%s%s", i ? " " : "", argv[i]);
    }
    bench_json_begin(j, NULL, '{');
    bench_json_text(j, "program", program);
    bench_json_text(j, "date", date);
    bench_json_text(j, "machine", machine);
    bench_json_text(j, "command", command);
    bench_json_text(j, "device", device);
    bench_json_begin(j, "tables", '[');
}

void bench_json_close(BenchJson* j) {
    if (!j->f) { return; }
    bench_json_end(j, ']');
    bench_json_end(j, '}');
    fprintf(j->f, "\n");
    const int bad = ferror(j->f);
    if (fclose(j->f) != 0 || bad || rename(j->temporary, j->path) != 0) {
        const int why = errno;
        (void)remove(j->temporary);
        fo_quit(1, "--json %s: %s", j->path, strerror(why));
    }
}
