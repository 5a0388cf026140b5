/* ref.h -- the oracle: every operation of fo_ops.h again, in double, one plain loop nest each, no cleverness.
 *
 * Tests of every device compare with it. Arguments are those of the fo_ function of the same name without the
 * stream, floatX and float turned into double (ref_read_floatx, ref_read_float). Its gradients are themselves
 * checked by finite differences, in test_ops.c. For small shapes only: attention computes a score anew
 * wherever it needs one.
 */
#ifndef REF_H
#define REF_H
#include "flashoverlap/fo_ops.h"
#include <math.h>

// ---- numbers ----------------------------------------------------------------------------------------------
static inline void ref_read_floatx(double* out, const floatX* inp, size_t nelem) {
    for (size_t i = 0; i < nelem; i++) {
        out[i] = (double)fo_float(inp[i]);
    }
}

static inline void ref_read_float(double* out, const float* inp, size_t nelem) {
    for (size_t i = 0; i < nelem; i++) {
        out[i] = (double)inp[i];
    }
}

// uniform in [-1, 1), the same on every machine; *state is any number
static inline double ref_random(uint64_t* state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * (1.0 / 4503599627370496.0) - 1.0;
}

// ---- rows -------------------------------------------------------------------------------------------------
static inline void ref_gather_rows(double* out, const double* inp, const int* idx, size_t n, int C) {
    for (size_t i = 0; i < n; i++) {
        for (int c = 0; c < C; c++) {
            out[i * (size_t)C + (size_t)c] = inp[(size_t)idx[i] * (size_t)C + (size_t)c];
        }
    }
}

static inline void ref_scatter_add_rows(double* out, const double* rows, const int* dst, const int* start,
                                        const int* order, size_t nuniq, int C) {
    for (size_t u = 0; u < nuniq; u++) {
        for (int k = start[u]; k < start[u + 1]; k++) {
            for (int c = 0; c < C; c++) {
                out[(size_t)dst[u] * (size_t)C + (size_t)c] += rows[(size_t)order[k] * (size_t)C + (size_t)c];
            }
        }
    }
}

static inline void ref_add_rows(double* out, const double* rows, const int* dst, size_t n, int C) {
    for (size_t i = 0; i < n; i++) {
        for (int c = 0; c < C; c++) {
            out[(size_t)dst[i] * (size_t)C + (size_t)c] += rows[i * (size_t)C + (size_t)c];
        }
    }
}

static inline void ref_encoder_forward(double* out, const double* rows, const double* wpe, const int* tok,
                                       const int* pos, size_t n, int C) {
    for (size_t i = 0; i < n; i++) {
        size_t row = (size_t)tok[i], p = (size_t)pos[row];
        for (int c = 0; c < C; c++) {
            out[row * (size_t)C + (size_t)c] =
                rows[i * (size_t)C + (size_t)c] + wpe[p * (size_t)C + (size_t)c];
        }
    }
}

// ---- layer norm -------------------------------------------------------------------------------------------
static inline void ref_layernorm_forward(double* out, double* mean, double* rstd, const double* inp,
                                         const double* weight, const double* bias, size_t n, int C) {
    for (size_t i = 0; i < n; i++) {
        const double* x = inp + i * (size_t)C;
        double m = 0.0, v = 0.0;
        for (int c = 0; c < C; c++) {
            m += x[c] / C;
        }
        for (int c = 0; c < C; c++) {
            v += (x[c] - m) * (x[c] - m) / C;
        }
        mean[i] = m;
        rstd[i] = 1.0 / sqrt(v + 1e-5);
        for (int c = 0; c < C; c++) {
            out[i * (size_t)C + (size_t)c] = (x[c] - m) * rstd[i] * weight[c] + bias[c];
        }
    }
}

static inline void ref_layernorm_backward(double* dinp, double* dweight, double* dbias, const double* dout,
                                          const double* inp, const double* weight, const double* mean,
                                          const double* rstd, size_t n, int C) {
    for (size_t i = 0; i < n; i++) {
        const double* x = inp + i * (size_t)C;
        const double* dy = dout + i * (size_t)C;
        double dnorm_mean = 0.0, dnorm_norm_mean = 0.0;
        for (int c = 0; c < C; c++) {
            double norm = (x[c] - mean[i]) * rstd[i];
            dweight[c] += dy[c] * norm;
            dbias[c] += dy[c];
            dnorm_mean += dy[c] * weight[c] / C;
            dnorm_norm_mean += dy[c] * weight[c] * norm / C;
        }
        for (int c = 0; c < C; c++) {
            double norm = (x[c] - mean[i]) * rstd[i];
            dinp[i * (size_t)C + (size_t)c] +=
                (dy[c] * weight[c] - dnorm_mean - norm * dnorm_norm_mean) * rstd[i];
        }
    }
}

// ---- matmul -----------------------------------------------------------------------------------------------
static inline void ref_matmul_forward(double* out, const double* inp, const double* weight,
                                      const double* bias, size_t n, int K, int OC) {
    for (size_t i = 0; i < n; i++) {
        for (int o = 0; o < OC; o++) {
            double sum = bias ? bias[o] : 0.0;
            for (int k = 0; k < K; k++) {
                sum += inp[i * (size_t)K + (size_t)k] * weight[(size_t)o * (size_t)K + (size_t)k];
            }
            out[i * (size_t)OC + (size_t)o] = sum;
        }
    }
}

static inline void ref_matmul_dgrad(double* dinp, const double* dout, const double* weight, size_t n, int K,
                                    int OC) {
    for (size_t i = 0; i < n; i++) {
        for (int k = 0; k < K; k++) {
            double sum = 0.0;
            for (int o = 0; o < OC; o++) {
                sum += dout[i * (size_t)OC + (size_t)o] * weight[(size_t)o * (size_t)K + (size_t)k];
            }
            dinp[i * (size_t)K + (size_t)k] = sum;
        }
    }
}

static inline void ref_bias_backward(double* dbias, const double* dout, size_t n, int C) {
    for (size_t i = 0; i < n; i++) {
        for (int c = 0; c < C; c++) {
            dbias[c] += dout[i * (size_t)C + (size_t)c];
        }
    }
}

static inline void ref_matmul_wgrad(double* dweight, double* dbias, const double* dout, const double* inp,
                                    size_t n, int K, int OC) {
    for (int o = 0; o < OC; o++) {
        for (int k = 0; k < K; k++) {
            for (size_t i = 0; i < n; i++) {
                dweight[(size_t)o * (size_t)K + (size_t)k] +=
                    dout[i * (size_t)OC + (size_t)o] * inp[i * (size_t)K + (size_t)k];
            }
        }
    }
    if (dbias) { ref_bias_backward(dbias, dout, n, OC); }
}

// ---- elementwise ------------------------------------------------------------------------------------------
#define REF_GELU_SCALE 0.79788456080286535588 // sqrt(2 / pi)

static inline double ref_gelu(double x) {
    return 0.5 * x * (1.0 + tanh(REF_GELU_SCALE * (x + 0.044715 * x * x * x)));
}

static inline double ref_gelu_slope(double x) {
    double t = tanh(REF_GELU_SCALE * (x + 0.044715 * x * x * x));
    double du = REF_GELU_SCALE * (1.0 + 3.0 * 0.044715 * x * x);
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du;
}

static inline void ref_gelu_forward(double* out, const double* inp, size_t nelem) {
    for (size_t i = 0; i < nelem; i++) {
        out[i] = ref_gelu(inp[i]);
    }
}

static inline void ref_gelu_backward(double* dinp, const double* dout, const double* inp, size_t nelem) {
    for (size_t i = 0; i < nelem; i++) {
        dinp[i] = dout[i] * ref_gelu_slope(inp[i]);
    }
}

static inline void ref_accumulate(double* out, const double* const parts[], const double* residual,
                                  const double* bias, size_t n, int C, int P) {
    for (size_t i = 0; i < n; i++) {
        for (int c = 0; c < C; c++) {
            size_t at = i * (size_t)C + (size_t)c;
            double sum = (residual ? residual[at] : 0.0) + (bias ? bias[c] : 0.0);
            for (int p = 0; p < P; p++) {
                sum += parts[p][at];
            }
            out[at] = sum;
        }
    }
}

static inline void ref_add(double* acc, const double* part, size_t nelem) {
    for (size_t i = 0; i < nelem; i++) {
        acc[i] += part[i];
    }
}

static inline void ref_sum(double* out, const double* const parts[], size_t nelem, int P) {
    for (size_t i = 0; i < nelem; i++) {
        double sum = 0.0;
        for (int p = 0; p < P; p++) {
            sum += parts[p][i];
        }
        out[i] = sum;
    }
}

// ---- attention --------------------------------------------------------------------------------------------
// scaled score of query position t and key position t2 of head h, sequence b
static inline double ref_attention_score(const double* qkv, FoLayout l, int NH, int hs, int b, int h, int t,
                                         int t2) {
    size_t D = (size_t)NH * (size_t)hs, at = (size_t)h * (size_t)hs;
    const double* q = qkv + fo_layout_row(l, b, t) * 3 * D + at;
    const double* k = qkv + fo_layout_row(l, b, t2) * 3 * D + D + at;
    double dot = 0.0;
    for (int i = 0; i < hs; i++) {
        dot += q[i] * k[i];
    }
    return dot / sqrt((double)hs);
}

static inline double ref_attention_lse(const double* qkv, FoLayout l, int NH, int hs, int b, int h, int t) {
    double max = -INFINITY, sum = 0.0;
    for (int t2 = 0; t2 <= t; t2++) {
        max = fmax(max, ref_attention_score(qkv, l, NH, hs, b, h, t, t2));
    }
    for (int t2 = 0; t2 <= t; t2++) {
        sum += exp(ref_attention_score(qkv, l, NH, hs, b, h, t, t2) - max);
    }
    return max + log(sum);
}

static inline void ref_attention_forward(double* out, double* lse, const double* qkv, size_t row0, size_t n,
                                         FoLayout l, int NH, int hs) {
    size_t D = (size_t)NH * (size_t)hs;
    for (int b = 0; b < l.B; b++) {
        for (int t = 0; t < l.T; t++) {
            size_t row = fo_layout_row(l, b, t);
            if (row < row0 || row >= row0 + n) { continue; }
            for (int h = 0; h < NH; h++) {
                double* o = out + row * D + (size_t)h * (size_t)hs;
                double z = ref_attention_lse(qkv, l, NH, hs, b, h, t);
                lse[row * (size_t)NH + (size_t)h] = z;
                for (int i = 0; i < hs; i++) {
                    o[i] = 0.0;
                }
                for (int t2 = 0; t2 <= t; t2++) {
                    const double* v = qkv + fo_layout_row(l, b, t2) * 3 * D + 2 * D + (size_t)h * (size_t)hs;
                    double p = exp(ref_attention_score(qkv, l, NH, hs, b, h, t, t2) - z);
                    for (int i = 0; i < hs; i++) {
                        o[i] += p * v[i];
                    }
                }
            }
        }
    }
}

// one query's share of the gradients of q, k and v; its out and lse are computed again
static inline void ref_attention_backward_query(double* dqkv, const double* dout, const double* qkv,
                                                FoLayout l, int NH, int hs, int b, int h, int t) {
    size_t D = (size_t)NH * (size_t)hs, at = (size_t)h * (size_t)hs, row = fo_layout_row(l, b, t);
    const double* dy = dout + row * D + at;
    double z = ref_attention_lse(qkv, l, NH, hs, b, h, t), dp_mean = 0.0, scale = 1.0 / sqrt((double)hs);
    for (int pass = 0; pass < 2; pass++) { // the first finds sum of p * dp
        for (int t2 = 0; t2 <= t; t2++) {
            size_t row2 = fo_layout_row(l, b, t2);
            const double* q = qkv + row * 3 * D + at;
            const double* k = qkv + row2 * 3 * D + D + at;
            const double* v = k + D;
            double p = exp(ref_attention_score(qkv, l, NH, hs, b, h, t, t2) - z), dp = 0.0;
            for (int i = 0; i < hs; i++) {
                dp += dy[i] * v[i];
            }
            if (pass == 0) {
                dp_mean += p * dp;
                continue;
            }
            double ds = p * (dp - dp_mean) * scale;
            double* dq = dqkv + row * 3 * D + at;
            double* dk = dqkv + row2 * 3 * D + D + at;
            double* dv = dk + D;
            for (int i = 0; i < hs; i++) {
                dq[i] += ds * k[i];
                dk[i] += ds * q[i];
                dv[i] += p * dy[i];
            }
        }
    }
}

// out and lse of the fo_ function are not needed here
static inline void ref_attention_backward(double* dqkv, const double* dout, const double* qkv, size_t row0,
                                          size_t n, FoLayout l, int NH, int hs) {
    size_t D = (size_t)NH * (size_t)hs;
    for (size_t i = row0 * 3 * D; i < (row0 + n) * 3 * D; i++) {
        dqkv[i] = 0.0;
    }
    for (int b = 0; b < l.B; b++) {
        for (int t = 0; t < l.T; t++) {
            size_t row = fo_layout_row(l, b, t);
            if (row < row0 || row >= row0 + n) { continue; }
            for (int h = 0; h < NH; h++) {
                ref_attention_backward_query(dqkv, dout, qkv, l, NH, hs, b, h, t);
            }
        }
    }
}

// ---- loss -------------------------------------------------------------------------------------------------
// FoSoftmaxStat as three vectors
static inline void ref_softmax_stats(double* max, double* sum, double* target, const double* logits,
                                     const int* targets, size_t n, int V, int valid, int v0) {
    for (size_t i = 0; i < n; i++) {
        const double* x = logits + i * (size_t)V;
        max[i] = -INFINITY;
        sum[i] = target[i] = 0.0;
        for (int v = 0; v < valid; v++) {
            max[i] = fmax(max[i], x[v]);
            if (v0 + v == targets[i]) { target[i] = x[v]; }
        }
        for (int v = 0; v < valid; v++) {
            sum[i] += exp(x[v] - max[i]);
        }
    }
}

// of the whole vocabulary at once: logits [n, V], not cut by rank. dlogits may be NULL
static inline void ref_softmax_loss(double* losses, double* dlogits, const double* logits, const int* targets,
                                    double dscale, double z, size_t n, int V, int valid) {
    for (size_t i = 0; i < n; i++) {
        const double* x = logits + i * (size_t)V;
        double max = -INFINITY, sum = 0.0;
        for (int v = 0; v < valid; v++) {
            max = fmax(max, x[v]);
        }
        for (int v = 0; v < valid; v++) {
            sum += exp(x[v] - max);
        }
        losses[i] = log(sum) + max - x[targets[i]];
        for (int v = 0; dlogits && v < V; v++) {
            double p = v < valid ? (1.0 + 2.0 * z * (log(sum) + max)) * exp(x[v] - max) / sum : 0.0;
            dlogits[i * (size_t)V + (size_t)v] = dscale * (p - (v == targets[i] ? 1.0 : 0.0));
        }
    }
}

// ---- optimizer --------------------------------------------------------------------------------------------
static inline void ref_adamw_update(double* master, double* m, double* v, const double* grad, size_t nelem,
                                    FoAdamw a) {
    double b1 = (double)a.beta1, b2 = (double)a.beta2;
    for (size_t i = 0; i < nelem; i++) {
        double g = grad[i] * (double)a.grad_scale;
        m[i] = b1 * m[i] + (1.0 - b1) * g;
        v[i] = b2 * v[i] + (1.0 - b2) * g * g;
        double mhat = m[i] / (1.0 - pow(b1, a.t)), vhat = v[i] / (1.0 - pow(b2, a.t));
        master[i] -=
            (double)a.lr * (mhat / (sqrt(vhat) + (double)a.eps) + (double)a.weight_decay * master[i]);
    }
}

static inline void ref_square_sum(double* out, const double* x, size_t nelem) {
    for (size_t i = 0; i < nelem; i++) {
        *out += x[i] * x[i];
    }
}
#endif
