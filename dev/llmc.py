#!/usr/bin/env python3
"""The model and the shards on which train_gpt is compared with llm.c's CPU program, number for number.

    python3 dev/llmc.py DIR     writes them, named as train_gpt2.c, run in DIR, reads them. Needs numpy

They are drawn from numpy's frozen generator: the same bytes on every machine, so that they need not be kept.
The losses are in dev/fixture/llmc_losses.txt; dev/reference.py makes that file with PyTorch,
dev/test/llmc_test.py compares train_gpt with it, dev/llmc_parity.sh with llm.c's program itself.
"""

import os
import sys

import numpy as np

import checkpoint

# train_gpt2.c's own: batch, length, learning rate 1e-4 and AdamW's numbers are constants there
B, T, NSTEPS = 4, 64, 20
HYPER = dict(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, clip=0.0)
# -f 0: no TF32, where fp32 runs on a GPU
FLAGS = "-b 4 -t 64 -k constant -l 1e-4 --beta1 0.9 --beta2 0.999 --eps 1e-8 -c 0 --clip 0 -s 0 -f 0".split()
# V leaves padding rows in wte, maxT positions without a gradient. Of the samples, train_gpt2.c draws 41
CONFIG = checkpoint.make_config(maxT=80, V=100, L=3, NH=4, C=48)
NSAMPLES, NVAL, SEED = 48, 6, 42
MODEL, TOKENIZER = "gpt2_124M.bin", "gpt2_tokenizer.bin"
TRAIN, VAL = (f"dev/data/tinyshakespeare/tiny_shakespeare_{split}.bin" for split in ("train", "val"))
LOSSES = "llmc_losses.txt"


def random_params():
    """{name: float32 array}: weights larger than a fresh model's, so that each tensor moves the loss."""
    rng, params = np.random.RandomState(20240326), {}
    for name, shape in checkpoint.tensor_shapes(CONFIG).items():
        half = {"wte": 0.3, "wpe": 0.3}.get(name, 0.25)
        x = half * (2.0 * rng.random_sample(shape) - 1.0) + (name in ("ln1w", "ln2w", "lnfw"))
        params[name] = x.astype(np.float32)
    params["wte"][CONFIG["V"] :] = 0.0
    return params


def tokens(nsamples, seed):
    """Every token depends on the one before it and on chance; a few more than whole samples."""
    rng = np.random.RandomState(seed)
    stream = [0]
    for jump in rng.randint(0, 5, nsamples * B * T + 7):
        stream.append((3 * stream[-1] + 11 * int(jump)) % CONFIG["V"])
    return np.array(stream)


def batches():
    """The first NSTEPS batches (x, y) of the training shard, in the order that doc/formats.md describes."""
    stream, order = tokens(NSAMPLES, 1), list(range(NSAMPLES))
    rng = np.random.RandomState(SEED)  # an mt19937, of which bytes() hands on 32 bits at a time as they come
    for i in range(NSAMPLES - 1, 0, -1):
        j = int.from_bytes(rng.bytes(4), "little") % (i + 1)
        order[i], order[j] = order[j], order[i]
    for sample in order[:NSTEPS]:
        part = stream[sample * B * T : (sample + 1) * B * T + 1]
        yield part[:-1].reshape(B, T), part[1:].reshape(B, T)


def write(folder):
    """-> nothing; the files are in the folder then, which is made."""
    for name in (TRAIN, VAL):
        os.makedirs(os.path.join(folder, os.path.dirname(name)), exist_ok=True)
    checkpoint.write_model(os.path.join(folder, MODEL), CONFIG, random_params())
    checkpoint.write_shard(os.path.join(folder, TRAIN), tokens(NSAMPLES, 1))
    checkpoint.write_shard(os.path.join(folder, VAL), tokens(NVAL, 2))
    letters = [b"%d " % i for i in range(CONFIG["V"])]
    checkpoint.write_tokenizer(os.path.join(folder, TOKENIZER), letters, 0)


def main(args):
    if len(args) != 1 or args[0].startswith("-"):
        print(__doc__.strip(), file=sys.stdout if args[:1] == ["--help"] else sys.stderr)
        return 0 if args[:1] == ["--help"] else 1
    write(args[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
