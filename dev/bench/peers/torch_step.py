#!/usr/bin/python3
"""Times training steps of GPT-2 in PyTorch: what train_gpt's are compared with. peers.py runs it.

    python3 dev/bench/peers/torch_step.py --model d12 -b 4 -t 1024 --steps 3 [--compile] [--device cuda] [--json FILE]

A step is forward, backward, clipping and AdamW of random weights on random tokens. It is written as a user of
PyTorch would write it to be fast: bf16 autocast, all cores, fused attention where torch has it (2.0 on), the fused
AdamW (2.4 on); --compile puts torch.compile over the model, and the first step, which is left out, compiles it.
Prints a line for each step, then the median; --json writes the same for programs. fp32 is slow with the reference
BLAS that Debian installs by default. dev/reference.py is the model to read, this one to time.
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from shapes import positive, sizes_of


class Block(nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.hs = C // NH
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x, mask):
        # q, k and v of a head lie together, so that heads can be cut over ranks (torch_tp.py)
        y = self.qkv(self.ln1(x))
        B, T, _ = y.shape
        q, k, v = (h.transpose(1, 2) for h in y.view(B, T, -1, 3, self.hs).unbind(3))
        if mask is None:
            att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # scaling and mask in the product's own pass: the quickest of four ways tried on torch 1.13
            NH = q.shape[1]
            q, k, v = (h.reshape(B * NH, T, -1) for h in (q, k, v))
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=1.0 / math.sqrt(self.hs))
            att = (scores.softmax(-1) @ v).view(B, NH, T, -1)
        x = x + self.attproj(att.transpose(1, 2).reshape(B, T, -1))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, L, C, NH, V, maxT):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(-(-V // 128) * 128, C), nn.Embedding(maxT, C)
        self.blocks = nn.ModuleList(Block(C, NH) for _ in range(L))
        self.lnf = nn.LayerNorm(C)
        self.head = nn.Linear(C, self.wte.num_embeddings, bias=False)
        self.head.weight = self.wte.weight  # tied
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x, y, positions, mask):
        h = self.wte(x) + self.wpe(positions)
        for block in self.blocks:
            h = block(h, mask)
        return F.cross_entropy(self.head(self.lnf(h)).flatten(0, 1), y.flatten())


def parser_of(doc):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=sizes_of, default="d12")
    parser.add_argument("-b", "--batch", type=positive, default=4, help="sequences in a batch")
    parser.add_argument("-t", "--time", type=positive, default=1024, help="tokens in a sequence")
    parser.add_argument("--steps", type=positive, default=3, help="of which the first is left out, if there are several")
    parser.add_argument("--compile", action="store_true", help="torch.compile: torch 2.0 on")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    return parser


def options_of(argv):
    parser = parser_of(__doc__)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="bf16: autocast")
    parser.add_argument(
        "--threads", type=positive, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    o = parser.parse_args(argv)
    if o.compile and not hasattr(torch, "compile"):
        sys.exit(f"torch_step.py: torch {torch.__version__} has no torch.compile: 2.0 or later has")
    return o


def version():
    return tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])


def adamw_of(model):
    fast = dict(fused=True) if version() >= (2, 4) else dict(foreach=True)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **fast)


def timed_steps(step, o, say=print):
    """Runs step() o.steps times, and says how long each took. -> figures for --json."""
    ntok, seconds, losses = o.batch * o.time, [], []
    for i in range(o.steps):
        start = time.perf_counter()
        losses.append(step())  # a number of the host: on a GPU it is waited for
        seconds.append(time.perf_counter() - start)
        say(f"step {i + 1}/{o.steps} | loss {losses[-1]:.6f} | {1e3 * seconds[-1]:.2f} ms | "
            f"{ntok / seconds[-1]:.1f} tok/s", flush=True)
    median = statistics.median(seconds[1:] or seconds)
    say(f"median {1e3 * median:.2f} ms | {ntok / median:.1f} tok/s")
    return dict(torch=torch.__version__, compiled=o.compile, device=o.device, model=o.model, B=o.batch, T=o.time,
                losses=losses, ms=[1e3 * s for s in seconds], median_ms=1e3 * median, tok_per_s=ntok / median)


def write_json(path, figures):
    with open(path + ".tmp", "w") as f:
        json.dump(figures, f, indent=1)
        f.write("\n")
    os.replace(path + ".tmp", path)


def main(argv):
    o = options_of(argv)
    torch.set_num_threads(o.threads)
    torch.manual_seed(42)
    o.model["maxT"] = max(o.model["maxT"], o.time)
    model = GPT(**o.model).to(o.device)
    optimizer = adamw_of(model)
    x, y = torch.randint(0, o.model["V"], (2, o.batch, o.time), device=o.device)
    positions, mask = torch.arange(o.time, device=o.device).unsqueeze(0), None
    if not hasattr(F, "scaled_dot_product_attention"):
        dtype = torch.bfloat16 if o.precision == "bf16" else torch.float32
        mask = torch.full((o.time, o.time), -math.inf, dtype=dtype, device=o.device).triu(1)
    called = torch.compile(model) if o.compile else model

    def step():
        with torch.autocast(o.device, dtype=torch.bfloat16, enabled=o.precision == "bf16"):
            loss = called(x, y, positions, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    print(
        f"torch {torch.__version__}, {o.precision}, {'compiled' if o.compile else 'eager'}, {o.device}, "
        f"{o.threads} threads, oneDNN {'yes' if torch.backends.mkldnn.is_available() else 'no'}, "
        f"attention {'fused' if mask is None else 'masked softmax'}; {o.model} B={o.batch} T={o.time}"
    )
    figures = timed_steps(step, o)
    if o.json:
        write_json(o.json, dict(figures, precision=o.precision, threads=o.threads, fused_attention=mask is None))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
