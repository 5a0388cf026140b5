#!/usr/bin/python3
"""Times training steps of GPT-2 in PyTorch on this machine's CPU: what train_gpt's tok/s is compared with.

    python3 dev/bench/torch_step.py --model d12 -b 4 -t 1024 --steps 3 [--precision bf16|fp32] [--json FILE]

A step is forward, backward, clipping and AdamW of random weights on random tokens. It is written as a user
of PyTorch would write it to be fast: bf16 autocast, all cores, fused attention where torch has it (2.0 on).
Prints a line for each step, then the median, that of the first left out; --json writes the same for programs.
fp32 is slow with the reference BLAS that Debian installs by default. The interpreter is the one that apt
installs torch for. dev/reference.py is the model to read, this one to time.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

MODELS = {  # layers, channels, heads
    "d6": (6, 384, 6),
    "d12": (12, 768, 12),
    "d24": (24, 1024, 16),
    "d36": (36, 1280, 20),
}
V, VP = 50257, 50304


class Block(nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.NH = NH
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = (
            h.view(B, T, self.NH, C // self.NH).transpose(1, 2) for h in self.qkv(self.ln1(x)).split(C, -1)
        )
        if mask is None:
            att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # scaling and mask in the product's own pass: the quickest of four ways tried on torch 1.13
            q, k, v = (h.reshape(B * self.NH, T, -1) for h in (q, k, v))
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=1.0 / math.sqrt(C // self.NH))
            att = (scores.softmax(-1) @ v).view(B, self.NH, T, -1)
        x = x + self.attproj(att.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, L, C, NH, maxT):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VP, C), nn.Embedding(maxT, C)
        self.blocks = nn.ModuleList(Block(C, NH) for _ in range(L))
        self.lnf = nn.LayerNorm(C)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x, y, mask):
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h, mask)
        logits = F.linear(self.lnf(h), self.wte.weight)  # tied
        return F.cross_entropy(logits.view(-1, VP), y.view(-1))


def step(model, optimizer, x, y, mask, precision):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = model(x, y, mask)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: want at least 1")
    return value


def options_of(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="d12")
    parser.add_argument("-b", "--batch", type=positive, default=4, help="sequences in a batch")
    parser.add_argument("-t", "--time", type=positive, default=1024, help="tokens in a sequence")
    parser.add_argument("--steps", type=positive, default=3, help="one of them warms up if there are several")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="bf16: autocast")
    parser.add_argument(
        "--threads", type=positive, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    parser.add_argument("--json", metavar="FILE", type=argparse.FileType("w"), help="write the figures there")
    return parser.parse_args(argv)


def main(argv):
    o = options_of(argv)
    torch.set_num_threads(o.threads)
    torch.manual_seed(42)
    model = GPT(*MODELS[o.model], maxT=o.time)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    x, y = torch.randint(0, V, (2, o.batch, o.time))
    mask = None
    if not hasattr(F, "scaled_dot_product_attention"):
        dtype = torch.bfloat16 if o.precision == "bf16" else torch.float32
        mask = torch.full((o.time, o.time), -math.inf, dtype=dtype).triu(1)
    onednn = torch.backends.mkldnn.is_available()
    print(
        f"torch {torch.__version__}, {o.precision}, {o.threads} threads, oneDNN {'yes' if onednn else 'no'}, "
        f"attention {'fused' if mask is None else 'masked softmax'}; {o.model} B={o.batch} T={o.time}"
    )
    ntok, seconds, cpu_seconds, losses = o.batch * o.time, [], [], []
    for i in range(o.steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(step(model, optimizer, x, y, mask, o.precision))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)  # of all threads: on a busy machine it says more
        print(
            f"step {i + 1}/{o.steps} | loss {losses[-1]:.6f} | {1e3 * seconds[-1]:.2f} ms "
            f"| {ntok / seconds[-1]:.1f} tok/s | cpu {cpu_seconds[-1]:.2f} s",
            flush=True,
        )
    timed = seconds[1:] or seconds
    median = statistics.median(timed)
    print(f"median {1e3 * median:.2f} ms | {ntok / median:.1f} tok/s")
    if o.json:
        figures = dict(
            torch=torch.__version__,
            precision=o.precision,
            threads=o.threads,
            onednn=onednn,
            fused_attention=mask is None,
            model=o.model,
            B=o.batch,
            T=o.time,
            losses=losses,
            ms=[1e3 * s for s in seconds],
            cpu_s=cpu_seconds,
            median_ms=1e3 * median,
            tok_per_s=ntok / median,
        )
        with o.json:
            json.dump(figures, o.json, indent=1)
            o.json.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
