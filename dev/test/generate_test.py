#!/usr/bin/python3
"""Runs `train_gpt --generate` and the sampler of training, as a user would: the likeliest text is the same on every
mesh, as threads and as processes, alone and with others; lengths, signals; each line of bad input.
"""

import os, re, shutil, signal, sys

import numpy as np

from program import (MPI, PROGRAM, Run, at_once, check, main, refused, succeeds, tmp, train, write)

sys.path.insert(0, "dev")
import checkpoint, forward


def generate(*args, model="fluent/model_00000150.bin", **how):
    """Text from a model; there are no data, and a folder is not made."""
    args = list(args)
    for flag, value in (("-g", 64), ("--temperature", 0), ("--tokenizer", "a_tokenizer.bin")):
        if flag not in args:
            args += [flag, value]
    return Run("-i", "none*", "-j", "none*", *([] if "-y" in args else ["-e", model]), "--generate", *args, **how)


def texts(run):
    """What a run has written, by prompt."""
    out = re.sub(r"(?m)^(decode: |# ).*\n", "", run.out)
    return [re.sub(r"\Aprompt \d+:\n", "", text) for text in re.findall(r"(?s)(?<=---\n)(.*?)\n---\n", out)]


def alike(got, want):
    """The same texts; in BF16 but for a token that is as likely as the other one: the logits that a token is chosen by, and what
    they are made of, are rounded to 8 bits, on each mesh in another order. Numpy says how far apart the two are.
    """
    config, params = checkpoint.read_model(f"{tmp}/fluent/model_00000150.bin")
    for a, b in zip(got, want):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), 0)
        if "FP32" in PROGRAM or at == 0:
            return False
        ids = np.frombuffer(b[:at].encode(), np.uint8).astype(np.int64)[None]
        doubles = {name: p.astype(np.float64) for name, p in params.items()}
        logits = forward.forward(doubles, ids, ids, config)[0][0, -1]
        chosen = sorted(logits)[-1] - min(logits[ord(a[at])], logits[ord(b[at])])
        print(f"after '{b[:at][-20:]}': '{a[at]}' or '{b[at]}', logits {chosen:.3f} apart of {max(abs(logits)):.2f}")
        if chosen > 8 * 2**-9 * max(abs(logits)):
            return False
    return len(got) == len(want)


def generates_alike(model):
    """The likeliest text is the same on every mesh, as threads and as processes, alone and with others, from a file,
    a folder and while training. What is drawn does not depend on dp."""
    prompts = ["The king", "The queen sees the", "T", "The storm breaks the letter.\nThe", "The fool "]
    single = prompts[:3] + prompts[4:]  # a line each
    write("prompts.txt", "\r\n\n".join(single).encode())
    alone = [texts(succeeds(generate("--prompt", p))) for p in single]
    check(all(len(t) == 1 and t[0].startswith(p) and len(t[0]) > 40 for t, p in zip(alone, single)), f"{alone}")
    alone = [t[0] for t in alone]
    check("finds" in alone[0] or "the " in alone[0][9:], f"it has learnt something: {alone}")
    meshes = [(1, 1, 2), (1, 1, 8), (1, 2, 1), (1, 2, 2), (1, 4, 2), (1, 3, 1), (2, 1, 1), (3, 1, 2), (2, 2, 2),
              (8, 1, 1)]

    def one(mesh, np=0, *more):
        flags = [x for pair in zip(("--dp", "--up", "--tp"), mesh) for x in pair]
        run = succeeds(generate("--prompt-file", "prompts.txt", *flags, *more, np=np))
        check(alike(texts(run), alone), f"{mesh}: {run.name}: {texts(run)} {alone}")
        check(run.out.splitlines()[-1].startswith("# prefill: "), f"its speed comes last: {run.out[-200:]}")
        told = run.out.count("decode: attention: all-reduce of")
        check(told == (mesh[1] * mesh[2] > 1), f"the plan is told once: {run.out[:300]}")

    at_once(*(lambda m=m: one(m) for m in meshes), lambda: one((1, 1, 1), 0, "-b", 1),
            lambda: one((1, 2, 2), 0, "-b", 3), lambda: one((2, 1, 3), 0, "--overlap", "slice:4", "-r", 0),
            lambda: one((1, 1, 4), 0, "--overlap", "flash:3"))
    for mesh in ((1, 2, 2), (2, 1, 2), (3, 1, 1)) if MPI else ():
        one(mesh, mesh[0] * mesh[1] * mesh[2])
    run = succeeds(generate("--prompt", single[0], "-y", 1, "-o", "fluent", "--tp", 2))
    check(alike(texts(run), alone[:1]), f"the newest checkpoint of a folder: {run.out}")
    run = succeeds(generate("--prompt", single[1], "-o", "nofolder"))
    check(texts(run) == alone[1:2] and not os.path.exists(f"{tmp}/nofolder"), "no folder is made")
    for mesh in ([], ["--up", 2], ["--tp", 2, "--dp", 2]):  # the last sample of a run is of its last checkpoint
        shutil.copytree(f"{tmp}/fluent", f"{tmp}/again{len(mesh)}")
        run = succeeds(train("-x", 150, "-b", 8, "-t", 32, "-d", 512, "-s", 150, "-g", 64, "-y", 1, "-o",
                             f"again{len(mesh)}", "--temperature", 0, "--prompt-file", "prompts.txt", "--tokenizer",
                             "a_tokenizer.bin", *mesh, model=model))
        check(alike(texts(run), alone), f"while training: {run.name}: {run.out[-900:]}")
    # a dp rank without a prompt does not stand in the way of the last update's weights
    succeeds(train("-x", 2, "-v", 0, "-s", 1, "-g", 4, "--dp", 2, "-z", 1, "--timeout", 10))
    drawn = [texts(succeeds(generate("--prompt-file", "prompts.txt", "--temperature", 1, "--dp", dp, "-b", b)))
             for dp, b in ((1, 4), (2, 1), (3, 4))]
    check(drawn[0] == drawn[1] == drawn[2] and drawn[0] != alone, f"drawn: {drawn}")
    return alone


def generates_within(alone):
    """Lengths, in tokens, one for each byte; no prompt; signals."""
    king = ["--prompt", "The king"]
    for args, prefilled, decoded in ((king + ["-g", 10], 8, 1), (king + ["-g", 9], 8, 0), (king + ["-g", 1000], 8, 55),
                                     ([], 1, 62), (["-g", 1], 1, 0),
                                     (["--prompt-file", "prompts.txt", "-b", 1], 36, 4 * 63 - 36)):
        run = succeeds(generate(*args))
        told = re.search(r"# prefill: (\d+) tokens .* decode: (\d+) tokens", run.out)
        check(told and (int(told[1]), int(told[2])) == (prefilled, decoded), f"{args}: {run.out[-200:]}")
        check("nan" not in run.out and "inf" not in run.out, f"rates: {run.out[-200:]}")
    run = generate("--prompt", "The", "--pace", "3e-6", "--tp", 2, quick=False)
    run.wait_for("---\nThe")
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    check(run.rc == 143 and run.err == "" and len(texts(run)[0]) < 60, f"stopped: {run.rc} {run.err} {run.out}")


def generate_refuses():
    def refused_text(says, *args, **how):
        run = generate(*args, **how).wait()
        check(run.rc == 1 and run.err.count("\n") == 1, f"one line: {run.name}: {run.rc} {run.err}")
        for part in says.split("|"):
            check(part in run.err, f"'{part}' is said: {run.name}: {run.err}")

    write("empty.txt", b"")
    write("blank.txt", b"\n\r\n\n")
    write("zero.txt", b"The\nki\0ng\n")
    write("long.txt", b"The\n" + b"x" * (1 << 20))
    write("high.txt", b"\nA\n" + b"x" * 64 + b"\n")
    refused_text("nothere.txt|No such file", "--prompt-file", "nothere.txt")
    refused_text("no prompt", "--prompt-file", "empty.txt")
    refused_text("no prompt", "--prompt-file", "blank.txt", "--tp", 2)
    for path in (".", "/dev/zero", "/dev/stdin"):
        refused_text("can't read|not a regular file", "--prompt-file", path)
    refused_text("--dry-run|want one of them", "--prompt", "x", "--dry-run")
    refused_text("zero.txt line 2|zero byte", "--prompt-file", "zero.txt")
    refused_text("long.txt line 2|1048576 tokens", "--prompt-file", "long.txt", "--dp", 2)
    refused_text("high.txt line 3|64 tokens|63", "--prompt-file", "high.txt", "-g", 1000)
    refused_text("8 tokens|7", "--prompt", "The king", "-g", 8)
    refused_text("0: a shorter one", "--prompt", "T", "-g", 1)
    refused_text("--prompt and --prompt-file", "--prompt", "T", "--prompt-file", "prompts.txt")
    refused_text("--prompt-file|notok.bin", "--prompt-file", "prompts.txt", "--tokenizer", "notok.bin")
    refused_text("256 tokens|V=200", "--prompt", "x", model="L=1,C=32,NH=4,V=200,maxT=64")
    refused_text("nothere.bin", "--prompt", "x", model="nothere.bin")
    refused_text("--tp 9|8 heads", "--prompt", "x", "--tp", 9)
    refused_text("standard output|No space left", "--prompt", "x", shell=">/dev/full")
    refused_text("nowhere|no complete checkpoint", "--prompt", "x", "-y", 1, "-o", "nowhere")
    refused("a prompt of 40 tokens|-t 40", "-b", 1, "-t", 32, "-s", 1, "--tokenizer", "a_tokenizer.bin", "--prompt",
            "x" * 40)


def test_generate():
    model = "L=2,C=64,NH=8,V=256,maxT=64"
    succeeds(train("-x", 150, "-b", 8, "-t", 32, "-d", 512, "-l", "3e-3", "-o", "fluent", model=model))
    alone = generates_alike(model)
    generates_within(alone)
    generate_refuses()


main((test_generate,))
