#!/usr/bin/python3
"""The losses of llm.c's CPU program, number for number: 20 steps on dev/llmc.py's model and shard, compared with
dev/fixture/llmc_losses.txt, which dev/reference.py makes with PyTorch. An FP32 build must have 5 decimals of each, a
BF16 build what its rounding allows. dev/llmc_parity.sh compares with llm.c's program itself.
"""

import os, re, sys

from program import PROGRAM, at_once, check, main, succeeds, tmp, train

sys.path.insert(0, os.path.abspath("dev"))
sys.dont_write_bytecode = True
import llmc

FP32 = "FP32" in PROGRAM
MOST = 5e-6 if FP32 else 5e-3


def losses_of(*more):
    flags = list(llmc.FLAGS)
    for name, value in zip(more[::2], more[1::2]):
        if name in flags:
            flags[flags.index(name) + 1] = value
        else:
            flags += [name, value]
    run = succeeds(train("-i", llmc.TRAIN, "-j", llmc.VAL, *flags, "-x", llmc.NSTEPS, model=llmc.MODEL,
                         env={"OMP_NUM_THREADS": "1"}))  # two runs at a time
    return [float(x) for x in re.findall(r"(?m)^step +\d+/\d+ \| loss ([\d.]+)", run.out)]


def apart(a, b):
    return max(abs(x - y) for x, y in zip(a, b))


def first_losses():
    llmc.write(tmp)
    with open(f"dev/fixture/{llmc.LOSSES}") as f:
        want = [float(line.split()[1]) for line in f if not line.startswith("#")]
    check(len(want) == llmc.NSTEPS and sum(want[-5:]) < sum(want[:5]) - 0.2, f"20 losses that fall: {want}")

    def same(*more):
        got = losses_of(*more)
        check(len(got) == llmc.NSTEPS and apart(got, want) <= MOST, f"llm.c's losses, {more}: {got} {want}")

    def other(name, value):  # an option that did nothing would be found nowhere else in this file
        got = losses_of(name, value)
        check(len(got) == llmc.NSTEPS and apart(got, want) > 2 * MOST, f"{name} {value} counts: {got} {want}")

    at_once(same, lambda: same("--tp", 2))
    if FP32:
        at_once(*(lambda c=c: other(*c) for c in (("--beta1", 0.8), ("--beta2", 0.95), ("--eps", 1e-4),
                                                  ("--clip", 0.5), ("-c", 0.1))))


if __name__ == "__main__":
    main([first_losses])
