#!/usr/bin/python3
"""Runs `train_gpt --eval` and HellaSwag while training, as a user would: the examples that a model gets right, its loss
and perplexity are numpy's on every mesh, for every B, as threads and as processes; signals; each line of bad input. So
is the gradient with a z-loss.
"""

import contextlib, os, re, signal, struct, subprocess, sys

import numpy as np

from program import (MPI, PROGRAM, Run, at_once, check, main, read, refused, shard, steps, succeeds, tmp, train, words, write)

sys.dont_write_bytecode = True
sys.path.insert(0, "dev")
import checkpoint
import forward

CONFIG = checkpoint.make_config(160, 250, 2, 4, 32)
N, T = 23, 160
random = np.random.RandomState(5)
stream = random.randint(0, CONFIG["V"], 16 * 32 + 1)  # of the z-loss


# ---- what is evaluated -------------------------------------------------------------------------------------
def make_model():
    """-> its parameters. Large weights: a model whose losses differ so much from token to token that rounding changes no choice."""
    spread = dict(wte=0.4, wpe=0.4, qkvw=0.3, attprojw=0.2, fcw=0.3, fcprojw=0.1)
    params = {name: random.normal(name in ("ln1w", "ln2w", "lnfw"), spread.get(name, 0.1), shape).astype(np.float32)
              for name, shape in checkpoint.tensor_shapes(CONFIG).items()}
    params["wte"][CONFIG["V"]:] = 0.0
    checkpoint.write_model(f"{tmp}/model.bin", CONFIG, params)
    return {name: p.astype(np.float64) for name, p in params.items()}


def losses_of(params, rows):
    """Of each row's tokens but the first. Rows of tokens, of any length."""
    padded = np.zeros((len(rows), max(map(len, rows))), int)
    for row, tokens in zip(padded, rows):
        row[:len(tokens)] = tokens
    losses = forward.forward(params, padded[:, :-1], padded[:, 1:], CONFIG)[1]
    return [x[:len(tokens) - 1] for x, tokens in zip(losses, rows)]


def make_examples():
    """-> (context, four completions) each, and numpy's choice. Of each the best is clear, and many are such that the
    sum instead of the mean, or the context's losses with it, would choose another; some have two that are the same."""
    examples, choices, others = [], [], 0
    while len(examples) < N:
        context = list(random.randint(0, CONFIG["V"], random.randint(1, 20)))
        ways = [list(random.randint(0, CONFIG["V"], random.randint(1, 12))) for _ in range(4)]
        if len(examples) % 5 == 3:
            ways[3] = ways[0]
        if len(examples) == 7:  # 65 positions: rows of 96, if the mesh cuts them
            context = list(random.randint(0, CONFIG["V"], 60))
            ways = [way[:6] for way in ways[:3]] + [list(random.randint(0, CONFIG["V"], 6))]
        losses = losses_of(params, [context + way for way in ways])
        means = [x[len(context) - 1:].mean() for x in losses]
        best, second = sorted(set(np.round(means, 9)))[:2]
        wrong = {int(np.argmin([x[len(context) - 1:].sum() for x in losses])), int(np.argmin([x.mean() for x in losses]))}
        if second - best > 0.4 and (wrong != {int(np.argmin(means))} or len(examples) % 2 or len(examples) == 7):
            others += wrong != {int(np.argmin(means))}
            examples.append((context, ways))
            choices.append(int(np.argmin(means)))
    check(others >= N // 2 and len(set(choices)) == 4, f"the examples tell: {others} {choices}")
    return examples, choices


def hellaswag(name, examples, labels):
    """llm.c's hellaswag_val.bin"""
    body, longest = [], 0
    for i, ((context, ways), label) in enumerate(zip(examples, labels)):
        tail = [label, 4, len(context), *context, *(x for way in ways for x in (len(way), *way))]
        body += [65535, 2 * (3 + len(tail)), i, *tail]
        longest = max(longest, 2 * (3 + len(tail)))
    head = struct.pack("<256i", 20240522, 1, len(examples), longest, *[0] * 252)
    return write(name, head, struct.pack(f"<{len(body)}H", *body))


# ---- runs --------------------------------------------------------------------------------------------------
def evaluate(*args, model="model.bin", np=0, **how):
    args = list(args)
    for flag, value in (("-v", 0), ("-h", 1), ("--hellaswag-data", "right.bin"), ("-b", 4), ("-t", T)):
        if flag not in args:
            args += [flag, value]
    return Run("--eval", "-i", "none*", *([] if "-y" in args else ["-e", model]), *args, np=np, **how)


def score(run):
    """(right, all) of each evaluation that a run has printed."""
    return [(int(a), int(b)) for a, b in re.findall(r"(?m)^HellaSwag: (\d+)/(\d+) = \d\.\d{6}$", run.out)]


def test_memory():
    """No gradients, no optimizer. The first test: while this process is small, since a run begins as a copy of it."""
    big = "L=6,C=256,NH=4,V=50257,maxT=64"
    args = ["-v", 1, "-m", 1, "-b", 1, "-t", 64, "-j", "z_val.bin"]
    peak = [succeeds(run).peak_mib for run in (train("-i", "z_val.bin", "-x", 1, *args, model=big),
                                               evaluate("-h", 0, *args, model=big))]
    check(peak[1] < 0.5 * peak[0], f"{peak} MiB")


def test_scores():
    """Numpy's choices on every mesh, for every B; also where there are fewer examples than ranks."""
    some = N - (N + 2) // 3
    two = 1 + (choices[1] == 3 - choices[1])

    def one(mesh, B, file="right.bin", want=N, n=N, processes=0, more=()):
        flags = [x for pair in zip(("--dp", "--up", "--tp"), mesh) for x in pair]
        run = succeeds(evaluate("-b", B, *flags, "--hellaswag-data", file, *more, np=processes))
        check(score(run) == [(want, n)], f"{score(run)}, want {want}/{n}: {run.name}")
        check("evaluating HellaSwag" not in run.out and "\r" not in run.out, f"no progress in a file: {run.out}")

    jobs = [((1, 1, 1), 1), ((1, 1, 1), 3), ((1, 1, 1), 4), ((1, 1, 2), 4), ((1, 1, 2), 3), ((1, 2, 1), 3), ((1, 2, 2), 2),
            ((2, 1, 2), 4), ((3, 1, 1), 5), ((1, 1, 4), 1), ((2, 1, 2), 4, "some.bin", some),
            ((1, 2, 1), 1, "some.bin", some), ((1, 1, 1), 40, "some.bin", some), ((4, 1, 1), 1, "two.bin", two, 2),
            ((1, 1, 1), 1, "two.bin", two, 2), ((1, 1, 2), 4, "right.bin", N, N, 0, ("--overlap", "flash:5"))]
    at_once(*(lambda j=j: one(*j) for j in jobs))
    if MPI:
        one((2, 1, 2), 3, "some.bin", some, N, 4)
    ours, theirs = os.openpty()  # a terminal is told how far it is, on a line that is gone at the end
    run = subprocess.Popen([PROGRAM, "--eval", "-e", "model.bin", "-j", "t_val.bin", "-v", "1", "-b", "1", "-t", str(T), "-h",
                            "1", "--hellaswag-data", "right.bin", "--pace", "3e-4", "--link", "1000,0"], cwd=tmp,
                           stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # nobody writes any more
        while part := os.read(ours, 4096):
            said += part
    os.close(ours)
    check(run.wait() == 0, f"exit status {run.returncode}: {said}")
    for part in (r"validating: [1-8]/8\r", r"\r\033\[Kval loss ", rf"evaluating HellaSwag: \d+/{N}\r",
                 rf"\r\033\[KHellaSwag: {N}/{N} = 1.0"):
        check(re.search(part, said.decode()), f"{part} on a terminal: {said}")


def test_validation():
    """All samples of all shards, each once, whatever the mesh; perplexity; the first -m batches."""
    lengths = (4 * T + 1, 4 * T, 9 * T, 8 * T + 2)  # of the second the target of its last token is missing
    streams = [random.randint(0, CONFIG["V"], n) for n in lengths]
    streams[0][:] = max(range(20), key=lambda c: np.mean(losses_of(params, [[c] * T])))  # the worst to predict
    for i, stream in enumerate(streams):
        shard(f"v_val{i}.bin", list(map(int, stream)))

    def want(B, most=None):  # B: sequences of a sample
        rows = [s[k * B * T + b * T: k * B * T + (b + 1) * T + 1] for s in streams
                for k in range((len(s) - 1) // (B * T)) for b in range(B)]
        return float(np.mean(losses_of(params, rows[:most and most * B])))

    first, all4, all2 = want(4, 2), want(4), want(2)
    check(abs(first - all2) > 0.2 and abs(all4 - all2) > 0.02, f"the shards tell: {first} {all4} {all2}")

    def one(loss, *args):
        run = succeeds(evaluate("-h", 0, "-v", 1, "-j", "v_val*", *args))
        got = re.findall(r"(?m)^val loss (\S+) perplexity (\S+)$", run.out)
        check(len(got) == 1 and abs(float(got[0][0]) - loss) < 4e-3 * loss, f"{got}, want {loss}: {run.name}")
        check(abs(float(got[0][1]) / np.exp(float(got[0][0])) - 1) < 1e-4, f"perplexity: {got}")

    at_once(lambda: one(want(2), "-m", -1, "-b", 2), lambda: one(want(2), "-m", 1000, "-b", 1, "--dp", 2),
            lambda: one(want(2), "-m", -1, "-b", 2, "--up", 2, "--tp", 2), lambda: one(want(2, 1), "-m", 1, "-b", 2),
            lambda: one(want(2, 3), "-m", 3, "-b", 1, "--dp", 2, "--tp", 2))


def test_while_training():
    """At -v's steps and the end, but not at step 0; main.log; what --eval says of the checkpoint; a signal."""
    args = ["-x", 5, "-v", 2, "-h", 1, "--hellaswag-data", "right.bin", "-t", T, "-b", 4, "-n", 2, "-o", "run"]
    run = succeeds(train("-i", "t_val.bin", "-j", "t_val.bin", "-l", "1e-2", "--tp", 2, *args, model="model.bin"))
    found = score(run)
    log = [line for line in read("run/main.log").decode().split("\n") if "eval" in line]
    check(len(found) == 3 and all(n == N for _, n in found), f"at steps 2, 4 and 5: {found}")
    check(log == [f"s:{s} eval:{a / N:.4f}" for s, (a, _) in zip((2, 4, 5), found)], f"main.log: {log}")
    check(found[0][0] < N, f"after two large steps other choices: {found}")
    check(len(re.findall(r"(?m)^val loss \S+ perplexity \S+\nHellaSwag: ", run.out)) == 3, f"after the loss: {run.out}")
    for args, want in ((["-y", 1, "-o", "run"], found[2]), (["-y", 1, "-o", "run", "--dp", 3], found[2])):
        check(score(succeeds(evaluate("--tp", 2, *args))) == [want], f"the newest checkpoint: {args}")
    check(score(succeeds(evaluate("--tp", 2, model="run/model_00000004.bin"))) == found[1:2], "one of them")
    check(steps("run") == [2, 4, 5] and "eval:" not in read("run/main.log").decode().split("s:5 eval")[1], "only read")
    run = train("-x", 2, "-v", 0, "-h", 1, "--hellaswag-data", "two.bin", "-t", T, model="model.bin")
    check(len(score(succeeds(run))) == 1, "without validation, at the end alone")
    run = evaluate("--pace", "1e-5", "--tp", 2, quick=False)
    run.wait_for("evaluating model.bin")
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    check(run.rc == 143 and run.err == "" and score(run) == [], f"stopped: {run.rc} {run.err} {run.out}")


def test_refusals():
    good = read("right.bin")

    def word(i, value):  # of the first example
        return good[:1024 + 2 * i] + struct.pack("<H", value) + good[1026 + 2 * i:]

    def bad(says, data, *args):
        name = f"bad{abs(hash((says, data)))}.bin"
        write(name, data)
        run = evaluate("--hellaswag-data", name, *args).wait()
        check(run.rc == 1 and run.err.count("\n") == 1 and run.out == "", f"{says}: {run.rc} {run.err} {run.out}")
        for part in says.split("|"):
            check(part in run.err, f"'{part}' is said: {run.err}")

    nbytes = struct.unpack_from("<H", good, 1026)[0]
    nothing = "--hellaswag-data: can't open nothere.bin: No such file"
    at_once(*(lambda c=c: bad(*c) for c in (
        ("0 bytes", b""), ("header alone has 1024", good[:1000]), ("a token shard, not a HellaSwag", read("z_val.bin")),
        ("version 2|only version 1", words(good, w1=2)), ("has 0 examples", words(good, w2=0)),
        ("2147483647 examples", words(good, w2=2**31 - 1)), (f"follow the last of its {N - 1}", words(good, w2=N - 1)),
        (f"example {N}: truncated", words(good, w2=N + 1)), ("even number", good[:-1]),
        ("says that it has|bytes", good[:-2]), ("example 0 begins with 7, want 65535", word(0, 7)),
        ("says that it has 29 bytes", word(1, 29)), (f"its tokens end after {nbytes}", word(1, nbytes + 2)),
        ("example 0 says that it is number 1", word(2, 1)), ("completion 4 is said to be right", word(3, 4)),
        ("has 3 completions, want 4", word(4, 3)), ("context has 0 tokens", word(5, 0)),
        ("context has 65535 tokens", word(5, 65535)), ("token 250 is not below|V=250", word(6, 250)))),
        lambda: bad("example 7 has 66 tokens|-t 64: -t 65 at least", good, "-t", 64),
        lambda: refused(nothing, "-x", 1, "-h", 1, "--hellaswag-data", "nothere.bin"),
        lambda: refused("not a regular file", "-x", 1, "-h", 1, "--hellaswag-data", ".", "--tp", 2))
    for says, args in (("nothing to do", ("-h", 0)), ("want one of them", ("--dry-run",)),
                       ("want one of them", ("--generate",)), ("no complete checkpoint to evaluate", ("-y", 1, "-o", "x")),
                       ("-t 161: the model has positions for 160", ("-t", 161)), ("no file matches", ("-v", 1, "-j", "no*"))):
        run = evaluate(*args).wait()
        check(run.rc == 1 and run.err.count("\n") == 1 and says in run.err, f"{args}: {run.err}")


def test_z_loss():
    """One step's gradient, from AdamW's m: the loss with the z-loss, which numpy computes, rises along it as steeply as
    it is long. The loss that is printed is without."""
    coefficient = 0.02
    x, y = stream[:-1].reshape(16, 32), stream[1:].reshape(16, 32)

    def total(p, z):
        logits, losses = forward.forward(p, x, y, CONFIG)
        log_z = losses + np.take_along_axis(logits, y[..., None], -1)[..., 0]
        return float(losses.mean() + z * np.square(log_z).mean())

    def slope(direction, z, step=1e-4):
        up, down = ({name: p + s * step * direction[name] for name, p in params.items()} for s in (1, -1))
        return (total(up, z) - total(down, z)) / (2 * step)

    def one(z, *mesh):
        name = "z" + "".join(map(str, (z, *mesh)))
        run = succeeds(train("-a", 1, "-x", 1, "-j", "z_val.bin", "-i", "none*", "-t", 32, "-o", name, *mesh,
                             *(("--z-loss", z) if z else ()), model="model.bin"))
        loss, norm = map(float, re.search(r"loss (\S+) .*norm (\S+) ", run.out).groups())
        m = checkpoint.read_optimizer(f"{tmp}/{name}/state_00000001.bin")[2][0]
        scale = 0.1 * min(1.0, 1.0 / norm)  # of AdamW, and the clip's
        grad = {n: p / scale / norm for n, p in m.items()}
        length = np.sqrt(sum(np.square(g).sum() for g in grad.values()))
        check(abs(loss - total(params, 0)) < 4e-3 * loss, f"cross entropy is printed: {loss} {total(params, 0)}: {name}")
        check(abs(length - 1) < 1e-3, f"it is {length} long: {name}")
        check(abs(slope(grad, z) / norm - 1) < 0.02, f"slope {slope(grad, z)}, want {norm}: {name}")
        if z:
            check(abs(slope(grad, 0) / norm - 1) > 0.1, f"the z-loss tells: {slope(grad, 0)} {norm}: {name}")

    at_once(lambda: one(0, "-b", 16), lambda: one(coefficient, "-b", 16), lambda: one(coefficient, "-b", 16, "--tp", 4),
            lambda: one(coefficient, "-b", 4, "--dp", 4, "-r", 3), lambda: one(coefficient, "-b", 8, "--up", 2, "--dp", 2),
            lambda: one(coefficient, "-b", 8, "--tp", 2, "--dp", 2, "-z", 2))


def make_evaluation():
    global params, examples, choices
    params = make_model()
    examples, choices = make_examples()
    hellaswag("right.bin", examples, choices)
    hellaswag("some.bin", examples, [(c + (i % 3 == 0)) % 4 for i, c in enumerate(choices)])
    hellaswag("two.bin", examples[:2], [choices[0], 3 - choices[1]])
    shard("z_val.bin", list(map(int, stream)))
    shard("t_val.bin", list(map(int, random.randint(0, CONFIG["V"], 8 * T + 2))))


main((test_memory, test_scores, test_validation, test_while_training, test_refusals, test_z_loss), make_evaluation)
