"""GPT-2's forward pass in numpy, in the precision of its parameters: what tests compare with, straight from the files.

From Python:  config, params = checkpoint.read_model("model.bin"); logits, losses = forward.forward(params, x, y, config)
"""

import numpy as np


def layernorm(x, w, b):
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * w + b


def attention(qkv, NH):
    nb, nt, width = qkv.shape
    q, k, v = np.moveaxis(qkv.reshape(nb, nt, 3, NH, width // 3 // NH), (2, 3), (0, 2))  # each [B, NH, T, hs]
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores[:, :, np.arange(nt)[:, None] < np.arange(nt)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bhqk,bhkd->bqhd", p, v).reshape(nb, nt, width // 3)


def forward(p, x, y, config):
    """-> logits [B, T, V], losses [B, T]. p: {name: array} as checkpoint.read_model returns; x, y: [B, T] tokens."""
    res = p["wte"][x] + p["wpe"][: x.shape[1]]
    for i in range(config["L"]):
        qkv = layernorm(res, p["ln1w"][i], p["ln1b"][i]) @ p["qkvw"][i].T + p["qkvb"][i]
        res = res + attention(qkv, config["NH"]) @ p["attprojw"][i].T + p["attprojb"][i]
        fc = layernorm(res, p["ln2w"][i], p["ln2b"][i]) @ p["fcw"][i].T + p["fcb"][i]
        # the tanh form, as a logistic
        act = fc / (1.0 + np.exp(-np.sqrt(8.0 / np.pi) * (fc + 0.044715 * fc**3)))
        res = res + act @ p["fcprojw"][i].T + p["fcprojb"][i]
    logits = layernorm(res, p["lnfw"], p["lnfb"]) @ p["wte"][: config["V"]].T
    top = logits.max(-1, keepdims=True)
    logsum = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    return logits, logsum - np.take_along_axis(logits, y[..., None].astype(np.int64), -1)[..., 0]
