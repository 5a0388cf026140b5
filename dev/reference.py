#!/usr/bin/env python3
"""GPT-2 in plain PyTorch on the CPU: what train_gpt is compared with. It makes the fixture in dev/fixture/.

    python3 dev/reference.py --write         makes dev/fixture/ anew (models, debug states, AdamW steps)
    python3 dev/reference.py --check         makes it again in memory and compares it with what is there
    python3 dev/reference.py --tolerances    measures the errors that fp32 and bf16 rounding explain

The fixture's values are computed in float64 and stored as float32, so what a comparison shows is train_gpt's
own error. On one version of torch it comes out bit for bit; on others --check allows a difference of 1e-6.
Random numbers are uniform, from numpy's frozen generator: the models are the same bytes on every machine.

forward() is the model. Rounding inside it goes through a Numbers object, which either does nothing or does
what the bf16 build does: the model that is tested against and the one that derives the tolerances are one.
dev/checkpoint.py holds the file formats; dev/fixture/README.md says what the files are for.
"""

import argparse
import math
import os
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import llmc

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixture")

# Small enough to commit. V leaves padding rows in wte, maxT leaves positions without a gradient. B=4 is cut
# into whole sequences by 1, 2 and 4 ranks, T=24 into zig-zag blocks by 2, 3 and 4. "odd" has 5 heads of 6
# channels: heads that 2, 3 and 4 ranks share unevenly, and rows that no vector width divides.
B, T, V, MAXT, NSTEPS = 4, 24, 67, 32, 10
FIXTURES = {
    "even": dict(seed=20240327, version5=True, config=checkpoint.make_config(MAXT, V, L=2, NH=4, C=32)),
    "odd": dict(seed=20240328, version5=False, config=checkpoint.make_config(MAXT, V, L=2, NH=5, C=30)),
}
HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip=1.0)


# ---- the model ---------------------------------------------------------------------------------------------
class Numbers:
    """Exact: computes in the dtype of the parameters, rounds nothing."""

    def weight(self, w):  # a parameter on its way into an operation
        return w

    def act(self, x):  # an activation or its gradient that is stored between operations
        return x

    def probs(self, p):  # softmax on its way into the product with v
        return p

    def scores(self, s):  # the gradient of the scores on its way into the products with q and k
        return s

    # column-parallel (its input gradient is a sum over ranks), or row-parallel (its output is)
    def column_linear(self, x, w, b=None):
        return F.linear(x, w, b)

    row_linear = column_linear


def layernorm(x, w, b):
    mean = x.mean(-1, keepdim=True)
    rstd = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
    return (x - mean) * rstd * w + b


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def attention(qkv, NH, num):
    nb, nt, C3 = qkv.shape
    q, k, v = (h.view(nb, nt, NH, C3 // 3 // NH).transpose(1, 2) for h in qkv.split(C3 // 3, dim=-1))
    scores = num.scores(q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
    later = torch.ones(nt, nt, dtype=torch.bool).triu(1)
    p = num.probs(scores.masked_fill(later, -math.inf).softmax(-1))
    return (p @ v).transpose(1, 2).reshape(nb, nt, C3 // 3)


def forward(params, x, y, config, num=Numbers()):
    """-> logits [B, T, V], mean loss. params: {name: tensor} as in llm.c's files; x, y: [B, T] int64."""
    w = {name: num.weight(p) for name, p in params.items()}
    res = num.act(w["wte"][x] + w["wpe"][: x.shape[1]])
    for i in range(config["L"]):
        ln1 = num.act(layernorm(res, w["ln1w"][i], w["ln1b"][i]))
        qkv = num.act(num.column_linear(ln1, w["qkvw"][i], w["qkvb"][i]))
        att = num.act(attention(qkv, config["NH"], num))
        res = num.act(res + num.row_linear(att, w["attprojw"][i], w["attprojb"][i]))
        ln2 = num.act(layernorm(res, w["ln2w"][i], w["ln2b"][i]))
        fc = num.act(num.column_linear(ln2, w["fcw"][i], w["fcb"][i]))
        act = num.act(gelu(fc))
        res = num.act(res + num.row_linear(act, w["fcprojw"][i], w["fcprojb"][i]))
    lnf = num.act(layernorm(res, w["lnfw"], w["lnfb"]))
    logits = num.act(num.column_linear(lnf, w["wte"][: config["V"]]))
    return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gradients(params, x, y, config, num=Numbers()):
    """-> logits, loss, {name: gradient}"""
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    logits, loss = forward(leaves, x, y, config, num)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return logits.detach(), loss.detach(), dict(zip(leaves, grads))


def train(params, batches, config, num=Numbers(), h=HYPER):
    """An AdamW step a batch (x, y). -> losses, with one more after the last step; norms before clipping;
    parameters; all gradients."""
    params = {name: p.clone() for name, p in params.items()}
    m = {name: torch.zeros_like(p) for name, p in params.items()}
    v = {name: torch.zeros_like(p) for name, p in params.items()}
    losses, norms, history = [], [], []
    for t, (x, y) in enumerate(batches, 1):
        _, loss, grads = gradients(params, x, y, config, num)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        scale = h["clip"] / norm if 0.0 < h["clip"] < norm else 1.0
        for name, p in params.items():
            g = grads[name] * scale
            m[name].mul_(h["beta1"]).add_(g, alpha=1.0 - h["beta1"])
            v[name].mul_(h["beta2"]).add_(g * g, alpha=1.0 - h["beta2"])
            step = (m[name] / (1.0 - h["beta1"] ** t)) / (
                (v[name] / (1.0 - h["beta2"] ** t)).sqrt() + h["eps"]
            )
            decay = h["weight_decay"] if name in checkpoint.DECAYED else 0.0
            p.sub_(h["lr"] * (step + decay * p))
        losses.append(float(loss))
        norms.append(norm)
        history.append(grads)
    losses.append(float(forward(params, x, y, config, num)[1]))
    return losses, norms, params, history


# ---- what the bf16 build does, on fp32 arithmetic ----------------------------------------------------------
def to_bf16(x):
    return x.to(torch.bfloat16).to(x.dtype)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return to_bf16(x) if there else x.clone()

    @staticmethod
    def backward(ctx, g):
        return (to_bf16(g) if ctx.back else g), None, None


class _Linear(torch.autograd.Function):
    """P ranks' partial sums, of the output or of the input's gradient: rounded to bf16, added in fp32."""

    @staticmethod
    def forward(ctx, x, w, b, row_P, column_P):
        ctx.save_for_backward(x, w)
        ctx.column_P = column_P
        if row_P:
            out = sum(
                to_bf16(xp @ wp.t()) for xp, wp in zip(x.tensor_split(row_P, -1), w.tensor_split(row_P, -1))
            )
        else:
            out = x @ w.t()
        return out if b is None else out + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        P = ctx.column_P
        if P:
            dx = sum(to_bf16(gp @ wp) for gp, wp in zip(g.tensor_split(P, -1), w.tensor_split(P, 0)))
        else:
            dx = g @ w
        g2 = g.flatten(0, -2)
        return dx, g2.t() @ x.flatten(0, -2), g2.sum(0), None, None


class Bf16(Numbers):
    """Rounds weights, and all activations and gradients that train_gpt stores as floatX; P ranks add up."""

    def __init__(self, P):
        self.P = P

    def weight(self, w):  # gradients of weights are fp32
        return _Round.apply(w, True, False)

    def act(self, x):
        return _Round.apply(x, True, True)

    def probs(self, p):
        return _Round.apply(p, True, False)

    def scores(self, s):
        return _Round.apply(s, False, True)

    def column_linear(self, x, w, b=None):
        return self._linear(x, w, b, 0, self.P)

    def row_linear(self, x, w, b=None):
        return self._linear(x, w, b, self.P, 0)

    def _linear(self, x, w, b, row_P, column_P):
        bias = torch.zeros(w.shape[0], dtype=w.dtype) if b is None else b
        return _Linear.apply(x, w, bias, row_P, column_P)


# ---- the fixture -------------------------------------------------------------------------------------------
def random_params(config, rng):
    """Large weights, and vectors that aren't 0 and 1: every gradient is far above rounding."""
    C = config["C"]
    spread = dict(
        wte=0.5,
        wpe=0.5,
        qkvw=1.5 / C**0.5,
        attprojw=1.0 / C**0.5,
        fcw=1.5 / C**0.5,
        fcprojw=1.0 / (4 * C) ** 0.5,
    )
    params = {}
    for name, shape in checkpoint.tensor_shapes(config).items():
        half = 3.0**0.5 * spread.get(name, 0.2)  # uniform in [-half, half) has this spread
        x = half * (2.0 * rng.random_sample(shape) - 1.0) + (1.0 if name in ("ln1w", "ln2w", "lnfw") else 0.0)
        if name == "wte":
            x[config["V"] :] = 0.0
        params[name] = x.astype(np.float32)
    return params


def random_batch(rng):
    """A stream of B*T + 1 tokens, as the loader reads it. The vocabulary's first and last token occur."""
    stream = rng.randint(0, V, B * T + 1)
    stream[5], stream[40] = 0, V - 1
    return stream[:-1].reshape(B, T), stream[1:].reshape(B, T)


def to_torch(params, dtype):
    return {name: torch.from_numpy(p).to(dtype) for name, p in params.items()}


def make(name):
    """-> parameters, x, y, what gradients() says, what train() says; the latter two in float64"""
    config, rng = FIXTURES[name]["config"], np.random.RandomState(FIXTURES[name]["seed"])
    params = random_params(config, rng)
    x, y = random_batch(rng)
    start, batch = to_torch(params, torch.float64), (torch.from_numpy(x), torch.from_numpy(y))
    return params, x, y, gradients(start, *batch, config), train(start, [batch] * NSTEPS, config)


STEPS_HEAD = """\
# Ten AdamW steps of {name}.bin on the batch of {name}_debug_state.bin, computed in float64.
# Made by: python3 dev/reference.py --write. A line is a word and its values:
#   hyper   learning rate, beta1, beta2, eps, weight decay (2-D tensors only), norm to which gradients are cut
#   step    number from 1, loss before the update, norm of the whole gradient before it is clipped
#   final   loss after the last update
#   moved   tensor, norm of its change over all steps; of qkvb without the rows of k
#   value   tensor, index of the element in the file's order (all layers), its value before, its value after
# The gradient of k's bias is 0 but for rounding (it shifts all scores of a query alike), and AdamW makes full
# steps out of rounding: so these rows are left out. Elements under `value` have gradients of one sign, clear
# of 0, in all ten steps.
"""


def spread_elements(grads, nsections=16):
    """In each of equal sections of a tensor, the element whose gradient stays farthest from 0."""
    floor = torch.stack([(g * grads[0].sign()).flatten() for g in grads]).min(0).values.numpy()
    rms = math.sqrt(float(np.mean([float(g.square().mean()) for g in grads])))
    edges = np.linspace(0, floor.size, nsections + 1).astype(int)
    best = [a + int(np.argmax(floor[a:b])) for a, b in zip(edges[:-1], edges[1:])]
    return [i for i in best if floor[i] > 0.3 * rms]


def without_k(name, x, config):
    return x.reshape(config["L"], 3, config["C"])[:, (0, 2)] if name == "qkvb" else x


def steps_text(name, params, trained):
    config = FIXTURES[name]["config"]
    losses, norms, after, history = trained
    rows = [STEPS_HEAD.format(name=name) + "hyper " + " ".join(f"{HYPER[k]:g}" for k in HYPER)]
    rows += [f"step {t + 1} {losses[t]:.9g} {norms[t]:.9g}" for t in range(NSTEPS)]
    rows.append(f"final {losses[NSTEPS]:.9g}")
    for tensor, before in params.items():
        change = without_k(tensor, after[tensor].numpy() - before, config)
        rows.append(f"moved {tensor} {float(np.linalg.norm(change)):.9g}")
    for tensor, before in params.items():
        for i in spread_elements([grads[tensor] for grads in history]):
            rows.append(f"value {tensor} {i} {before.flat[i]:.9g} {float(after[tensor].flatten()[i]):.9g}")
    return "\n".join(rows) + "\n"


LLMC_HEAD = """\
# The first losses of llm.c's train_gpt2.c on the model and the shard that dev/llmc.py makes, in float64.
# Made by: python3 dev/reference.py --write. A line is a step, from 1, and its loss before the update.
"""


def llmc_text():
    params = to_torch(llmc.random_params(), torch.float64)
    batches = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in llmc.batches()]
    losses = train(params, batches, llmc.CONFIG, h=llmc.HYPER)[0][: llmc.NSTEPS]
    return LLMC_HEAD + "".join(f"{t} {loss:.9g}\n" for t, loss in enumerate(losses, 1))


def write_fixture(folder):
    """Writes all files of the fixture, and returns their names."""
    names = []
    for name, fixture in FIXTURES.items():
        config = fixture["config"]
        params, x, y, (logits, loss, grads), trained = make(name)
        path = os.path.join(folder, name)
        checkpoint.write_model(f"{path}.bin", config, params)
        names.append(f"{name}.bin")
        if fixture["version5"]:
            checkpoint.write_model(f"{path}_bf16.bin", config, params, checkpoint.MODEL_BF16)
            names.append(f"{name}_bf16.bin")
        grads = {tensor: g.numpy() for tensor, g in grads.items()}
        checkpoint.write_state(f"{path}_debug_state.bin", config, x, y, logits.numpy(), float(loss), grads)
        with open(f"{path}_steps.txt", "w") as f:
            f.write(steps_text(name, params, trained))
        names += [f"{name}_debug_state.bin", f"{name}_steps.txt"]
    with open(os.path.join(folder, llmc.LOSSES), "w") as f:
        f.write(llmc_text())
    return names + [llmc.LOSSES]


def largest_difference(old, new):
    """Of two files of the fixture, relative; infinite where anything but numbers differs."""
    with open(old, "rb") as f, open(new, "rb") as g:
        a, b = f.read(), g.read()
    if a == b:
        return 0.0
    if old.endswith("_debug_state.bin") and len(a) == len(b):
        nids = checkpoint.HEADER_NBYTES + 4 * 2 * B * T
        x, y = (np.frombuffer(data, "<f4", offset=nids).astype(np.float64) for data in (a, b))
        return float(np.linalg.norm(x - y) / np.linalg.norm(y)) if a[:nids] == b[:nids] else math.inf
    if old.endswith(".txt"):
        x, y = ([w for row in data.decode().splitlines() for w in row.split()] for data in (a, b))
        return (
            max((word_difference(u, w) for u, w in zip(x, y)), default=0.0) if len(x) == len(y) else math.inf
        )
    return math.inf  # a model: its bytes are the same on every machine


def word_difference(u, w):
    if u == w:
        return 0.0
    try:
        return abs(float(u) - float(w)) / max(abs(float(w)), 1e-3)
    except ValueError:
        return math.inf


def check_fixture():
    rc = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in write_fixture(folder):
            path = os.path.join(HERE, name)
            if not os.path.exists(path):
                print(f"{path}: is missing; python3 dev/reference.py --write makes it")
                rc = 1
                continue
            diff = largest_difference(path, os.path.join(folder, name))
            same = "the same bytes" if diff == 0.0 else f"differs by {diff:.1e}, allowed 1e-06"
            print(f"{name}: {same}")
            rc |= diff > 1e-6
    return int(rc)


# ---- tolerances --------------------------------------------------------------------------------------------
def relative(got, want):
    return float((got.double() - want).norm() / want.norm())


def errors(name):
    """-> {what: {quantity: relative 2-norm error against float64}} for fp32 and for bf16 on 1 ... 4 ranks"""
    config = FIXTURES[name]["config"]
    params, x, y, (logits, loss, grads), (losses, norms, after, _) = make(name)
    start = to_torch(params, torch.float32)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    found = {}
    for what, num in [("fp32", Numbers())] + [(f"bf16 P={P}", Bf16(P)) for P in (1, 2, 3, 4)]:
        got_logits, got_loss, got = gradients(start, x, y, config, num)
        got_losses, got_norms, got_after, _ = train(start, [(x, y)] * NSTEPS, config, num)
        e = {"logits": relative(got_logits, logits), "loss": relative(got_loss, loss)}
        e.update({f"d {tensor}": relative(got[tensor], g) for tensor, g in grads.items()})
        e["ten losses (worst)"] = max(abs(a / b - 1.0) for a, b in zip(got_losses, losses))
        e["ten norms (worst)"] = max(abs(a / b - 1.0) for a, b in zip(got_norms, norms))
        changes = {
            tensor: [
                without_k(tensor, (p[tensor].double() - torch.from_numpy(params[tensor])), config)
                for p in (got_after, after)
            ]
            for tensor in params
        }
        e["change in ten steps (worst)"] = max(relative(a, b) for a, b in changes.values())
        e["`moved` (worst)"] = max(abs(float(a.norm() / b.norm()) - 1.0) for a, b in changes.values())
        e["`value`, after (worst, in lr)"] = max(value_errors(name, params, got_after))
        found[what] = e
    return found


def value_errors(name, params, after):
    with open(os.path.join(HERE, f"{name}_steps.txt")) as f:
        rows = [row.split() for row in f if row.startswith("value ")]
    return [abs(float(after[t].flatten()[int(i)]) - float(v)) / HYPER["lr"] for _, t, i, _, v in rows]


def print_tolerances():
    found = {name: errors(name) for name in FIXTURES}
    print("| quantity | fp32 even | fp32 odd | bf16 even, worst P | bf16 odd, worst P |")
    print("| --- | --- | --- | --- | --- |")
    for quantity in found["even"]["fp32"]:
        cells = []
        for kind in ("fp32", "bf16"):
            for name in FIXTURES:
                worst = max(e[quantity] for what, e in found[name].items() if what.startswith(kind))
                cells.append(f"{worst:.1e}")
        print(f"| {quantity} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="make dev/fixture/ anew")
    what.add_argument("--check", action="store_true", help="compare dev/fixture/ with what would be made")
    what.add_argument("--tolerances", action="store_true", help="print the errors that rounding explains")
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    if options.write:
        os.makedirs(HERE, exist_ok=True)
        for name in write_fixture(HERE):
            print(f"{name}: {os.path.getsize(os.path.join(HERE, name)):,} bytes")
        return 0
    if options.check:
        return check_fixture()
    print_tolerances()
    return 0


if __name__ == "__main__":
    sys.exit(main())
