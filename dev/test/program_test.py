#!/usr/bin/python3
"""Runs the program itself, as a user would: the same files from every mode, transport and run; stop and resume; the
formats; each line of bad input; killed ranks; odd sizes. Every run has a time limit, so a hang is a failed check.
ONLY=resume runs test_resume alone. Meshes of up and dp: mesh_test.py.
"""

import array, os, re, shutil, signal, struct, subprocess, time

from program import (MODEL, MPI, PROGRAM, QUICK, Run, at_once, check, close, data, listing, listing_names, losses, main,
                     read, refused, same, shard, steps, succeeds, tmp, train, words, write)


def make_models():
    succeeds(train("-x", 2, "--tp", 3, "-b", 3, "-o", "by3"))
    raw = read("by3/model_00000002.bin")
    write("five.bin", raw)
    write("three.bin", widened(raw))


def widened(raw):
    """A bf16 model file, version 5, as one of version 3."""
    bits = array.array("H", raw[1024:])
    return words(raw, w1=3)[:1024] + array.array("I", (x << 16 for x in bits)).tobytes()


# ---- the same files ----------------------------------------------------------------------------------------
def test_modes():
    """Overlap, sequence parallelism and transport change no bit; the topology orders sums, so it may."""
    jobs = []
    for tp in (2, 3, 4):
        for shape, b, t in (("whole", 12, 8), ("zigzag", 1, 48)):
            for topology in ("direct", "ring"):
                for sp in (1, 0):
                    modes = ["none", "slice:2", "slice:4", "flash", "flash:2"]
                    if topology == "ring" or sp == 0:
                        modes = modes[::2] if sp else modes[1:4:2]
                    jobs.append((f"{shape}{tp}{topology}", tp, b, t, topology, sp, modes))

    def one(group, tp, b, t, topology, sp, mode):
        folder = f"{group}{sp}{mode}"
        succeeds(train("-x", 2, "-b", b, "-t", t, "--tp", tp, "--sp", sp, "--overlap", mode, "--topology",
                       topology, "-o", folder))
        if folder != f"{group}1none":
            same(f"{group}1none", folder, folder)

    at_once(*(lambda j=j: one(*j[:6], "none") for j in jobs if j[5] == 1))
    at_once(*(lambda j=j, m=m: one(*j[:6], m) for j in jobs for m in j[6] if j[5] == 0 or m != "none"))

    for tp, b, t, sp in ((2, 12, 8, 1), (4, 1, 48, 1), (4, 12, 8, 0)) if MPI else ():
        folder, threads = f"np{tp}{b}{sp}", f"{'whole' if b == 12 else 'zigzag'}{tp}direct1none"
        run = succeeds(train("-x", 2, "-b", b, "-t", t, "--tp", tp, "--sp", sp, "-o", folder, np=tp))
        check(run.out.count("step    1/2 ") == 1, f"one process prints: {run.out}")
        same(threads, folder, folder)


def test_ranks():
    """Every tp trains the same model: the losses differ by rounding alone. Uneven heads, uneven everything."""
    cases = [("even", "L=2,C=64,NH=8,V=256,maxT=64", (1, 2, 3, 4, 6, 8), 24),
             ("uneven", "L=2,C=40,NH=5,V=200,maxT=64", (1, 2, 3, 4, 5), 60),
             ("xl", "L=1,C=100,NH=25,V=131,maxT=64", (1, 4), 4)]
    shapes = []
    for name, model, tps, b in cases:
        for tp in tps:
            shapes.append((name, model, tp, b))

    def one(name, model, tp, b):
        succeeds(train("-x", 4, "-b", b, "-t", 16, "-l", "1e-3", "--tp", tp, "-o", f"{name}{tp}", model=model))

    at_once(*(lambda s=s: one(*s) for s in shapes))
    for name, _, tp, _ in shapes:
        # bf16 has 8 bits: a sum of rounding errors over a batch's mean loss of about 5 is far below 2e-3
        close(losses(f"{name}1"), losses(f"{name}{tp}"), 2e-3, f"{name}: losses at tp 1 and {tp}")
    check(losses("even1")[0] - losses("even1")[3] > 0.05, f"it learns: {losses('even1')}")


# ---- stop and resume ---------------------------------------------------------------------------------------
LONG = ["-d", 128, "-c", "0.1", "-l", "1e-3", "-i", "many_train*", "-j", "many_val*"]


def resume_is_exact():
    """8 steps in one go are 4 and 4: with accumulated gradients, over several epochs of shuffled shards."""
    succeeds(train(*LONG, "-k", "cosine", "-u", 2, "-q", "0.1", "-x", 8, "-n", 4, "--tp", 2, "-o", "go"))
    check(steps("go") == [4, 8], f"checkpoints {steps('go')}")
    shutil.copytree(f"{tmp}/go", f"{tmp}/again")
    for f in os.listdir(f"{tmp}/again"):
        if f.endswith("08") or f.endswith("08.bin"):
            os.remove(f"{tmp}/again/{f}")
    run = succeeds(train(*LONG, "-k", "cosine", "-u", 2, "-q", "0.1", "-x", 8, "-n", 4, "--tp", 2, "-y", 1, "-o",
                         "again"))
    check("resuming at step 4" in run.out, run.out)
    same("go", "again", "resumed")
    check(losses("again") == losses("go") + losses("go")[4:], f"main.log goes on: {losses('again')}")
    run = succeeds(train(*LONG, "-x", 8, "--tp", 2, "-y", 1, "-o", "again"))
    same("go", "again", "nothing is left to do")


def resume_elsewhere():
    """Another tp goes on within rounding."""
    succeeds(train(*LONG, "-x", 4, "-o", "one"))
    shutil.copytree(f"{tmp}/one", f"{tmp}/four")
    at_once(lambda: succeeds(train(*LONG, "-x", 8, "-y", 1, "-o", "one")),
            lambda: succeeds(train(*LONG, "-x", 8, "-y", 1, "--tp", 4, "-o", "four")))
    close(losses("one"), losses("four"), 2e-3, "resumed at tp 1 and 4")
    check(steps("four") == [4, 8], f"checkpoints {steps('four')}")


def checkpoints_are_pruned():
    succeeds(train("-x", 10, "-n", 2, "-nk", 2, "-nm", 4, "-o", "pruned"))
    check(steps("pruned") == [4, 8, 10], f"the newest two and multiples of 4: {steps('pruned')}")
    check(len(listing("pruned")) == 10, f"no file of the others: {listing('pruned')}")


def stopped(sig, tp, folder, np=0):
    """A signal ends training after the step, with a checkpoint as if that had been the last step."""
    args = ["-k", "constant", "-b", 12, "--tp", tp, "-o"]
    run = train("-x", 1000000, *args, folder, np=np)
    run.wait_for("step    3/")
    if np and sig == signal.SIGTERM:  # mpirun would kill the others soon after
        os.kill(run.ranks()[-1], sig)
    else:
        run.process.send_signal(sig)
    run.wait()
    check(run.rc == 128 + sig, f"exit status {run.rc}, signal {sig}: {run.err}")
    check(np or run.err == "", f"nothing on stderr: {run.err}")
    done = steps(folder)
    told = f"stopped by signal {int(sig)} after step {done[0] if done else ''}"
    check(len(done) == 1 and told in run.out, f"{done}: {run.out[-200:]}")
    if done:
        succeeds(train("-x", done[0], *args, folder + "ref"))
        same(folder, folder + "ref", f"stopped at step {done[0]}")


def stopped_while_writing():
    """Signals again and again, while a checkpoint is written, harm none."""
    model = "L=2,C=256,NH=4,V=256,maxT=64"
    run = train("-x", 1000000, "-n", 1, "-nk", 2, "-b", 1, "-o", "writing", model=model)
    end = time.time() + 30
    while time.time() < end and not any(f.endswith(".tmp") for f in listing_names("writing")):
        time.sleep(0.0005)
    for _ in range(5):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    run.wait()
    done, names = steps("writing"), listing_names("writing")
    check(run.rc == 130 and done, f"exit status {run.rc}: {run.err}")
    check(not any(f.endswith(".tmp") for f in names) and len(names) == 3 * len(done) + 1, f"whole: {names}")
    succeeds(train("-x", done[-1] + 1, "-y", 1, "-b", 1, "-o", "writing", model=model))


def stopped_early():
    """In the first step, while it validates, while it writes text: it still ends as it should."""
    run = train("-x", 1000000, "-v", 1, "-m", -1, "-s", 1, "-g", 64, "-o", "early")
    run.wait_for("seq_len")
    run.process.send_signal(signal.SIGINT)
    run.wait()
    check(run.rc == 130 and steps("early") == [1], f"exit status {run.rc}, {steps('early')}")
    run = train("-x", 1000000, "-s", 1, "-g", 1000000, "-o", "text", "--tp", 2)
    run.wait_for("generating")
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    check(run.rc == 143 and len(steps("text")) == 1, f"exit status {run.rc}, {steps('text')}")


def test_resume():
    jobs = [resume_is_exact, resume_elsewhere, checkpoints_are_pruned, stopped_while_writing, stopped_early,
            lambda: stopped(signal.SIGTERM, 1, "term"), lambda: stopped(signal.SIGINT, 3, "int")]
    if MPI:
        jobs += [lambda: stopped(signal.SIGTERM, 2, "termnp", np=2), lambda: stopped(signal.SIGUSR1, 2, "usr1", np=2)]
    for job in jobs:
        job()


# ---- new weights -------------------------------------------------------------------------------------------
def bf16(raw):
    return array.array("f", array.array("I", (x << 16 for x in array.array("H", raw))).tobytes())


def test_new_weights():
    """A model from scratch is llm.c's, whatever tp: checked is what a step with a learning rate of 0 writes."""
    L, C, NH, V, Vp, maxT = 2, 64, 4, 130, 256, 16
    model = f"L={L},C={C},NH={NH},V={V},maxT={maxT}"
    for tp in (1, 3):
        succeeds(train("-l", 0, "-x", 1, "-b", 3, "--tp", tp, "-o", f"new{tp}", model=model))
    raw = read("new1/model_00000001.bin")
    check(raw == read("new3/model_00000001.bin"), "new weights at tp 1 and 3")
    # what torch.manual_seed(42); torch.randn(...) begins with
    randn = [1.9269, 1.4873, 0.9007, -2.1055, 0.6784, -1.2345, -0.0431, -1.6047]
    check(all(abs(x - 0.02 * y) < 0.002 * abs(y) for x, y in zip(bf16(raw[1024:1040]), randn)), "the first weights")
    shapes = [("wte", V * C, .02), ("padding", (Vp - V) * C, 0), ("wpe", maxT * C, .02), ("ln1w", L * C, 1),
              ("ln1b", L * C, 0)] + [("qkvw", C * C, .02)] * 3 * L + [("qkvb", L * 3 * C, 0)]
    shapes += [("attprojw", L * C * C, .01), ("attprojb", L * C, 0), ("ln2w", L * C, 1), ("ln2b", L * C, 0),
               ("fcw", L * 4 * C * C, .02), ("fcb", L * 4 * C, 0), ("fcprojw", L * 4 * C * C, .01),
               ("fcprojb", L * C, 0), ("lnfw", C, 1), ("lnfb", C, 0)]
    at = 1024
    for name, n, size in shapes:
        x, at = bf16(raw[at:at + 2 * n]), at + 2 * n
        rms = (sum(v * v for v in x) / n) ** 0.5
        check(abs(rms - size) <= (0.1 * size if size < 1 else 0), f"{name} has a mean square of {rms:.4f}^2")
    check(at == len(raw), "all tensors are looked at")


# ---- formats -----------------------------------------------------------------------------------------------
def test_formats():
    raw = read("five.bin")
    check(struct.unpack("<8i", raw[:32]) == (20240326, 5, 64, 256, 1, 4, 32, 256), "header of a model")
    for version in ("three", "five"):  # a learning rate of 0 writes the weights that were read
        succeeds(train("-l", 0, "-x", 1, "-v", 1, "-o", f"from{version}", model=f"{version}.bin"))
    check(read("fromfive/model_00000001.bin") == raw, "tp 1 reads and writes what tp 3 wrote")
    check(listing("fromthree") == listing("fromfive"), "version 3 and version 5")
    succeeds(train("-x", 2, "-i", "wide_train*", "-j", "wide_val*", "-o", "from32"))
    succeeds(train("-x", 2, "-o", "from16"))
    check(listing("from16") == listing("from32"), "shards of 2 and 4 bytes a token")
    run = succeeds(train("-x", 1, "-s", 1, "-g", 12, "--tokenizer", "a_tokenizer.bin", "--prompt", "The king",
                         "--top-k", 1))
    check("---\nThe king" in run.out, f"a sample goes on from its prompt: {run.out[-200:]}")
    twin = succeeds(train("-x", 1, "-s", 1, "-g", 12, "--tokenizer", "a_tokenizer.bin", "--prompt", "The king",
                          "--temperature", 0))
    texts = [re.findall("(?s)\n---\n(.*?)\n---\n", r.out) for r in (run, twin)]
    check(texts[0] == texts[1] and len(texts[0]) == 1, f"the likeliest text, twice: {texts}")


def test_dry_run():
    """Prints and stops; the memory that it tells is what a run takes, within 10 %."""
    model, shape = "L=2,C=512,NH=8,V=4096,maxT=256", ("-b", 4, "-t", 256, "--tp", 2, "-x", 1)
    plan = succeeds(Run(*data(), "-e", model, *shape, "-o", "dry", "--dry-run", quick=False))
    for what in ("wte ", "fcprojw", "memory of rank 1", "F1 ", "H3 "):
        check(what in plan.out, f"--dry-run tells {what}: {plan.out}")
    check(not os.path.exists(f"{tmp}/dry"), "--dry-run leaves no folder behind")
    told = re.search(r"process, .*about (\d+) MiB", plan.out)
    run = succeeds(train(*shape, model=model, quick=False))
    told = float(told.group(1)) if told else 0.0
    check(0.9 <= told / run.peak_mib <= 1.1, f"memory: told {told:.0f} MiB, measured {run.peak_mib:.0f}")
    run = Run("--help", quick=False).wait()
    check(run.rc == 0 and "--overlap" in run.out and run.err == "", "--help")


# ---- bad input ---------------------------------------------------------------------------------------------
def damaged(raw, kind):
    """(what is said, bytes) of one kind of damage after the other; raw is sound and of this kind."""
    yield "is empty", b""
    yield "", raw[:700]
    yield "", raw[:-3]
    yield "", raw + b"\0\0"
    yield "", words(raw, w0=123456789)
    yield "version", words(raw, w1=99)
    yield "endian", b"".join(raw[i:i + 4][::-1] for i in range(0, len(raw) // 4 * 4, 4))
    yield "", b"<!DOCTYPE html><html>not found</html>" * 99
    yield "", os.urandom(4096)
    if kind != "shard":
        yield "a token shard", read("a_val_000000.bin")
    else:
        yield "a tokenizer", read("a_tokenizer.bin")


def bad_files():
    raw = read("a_train_000001.bin")
    refused("no file matches|none*", "-i", "none*", "-j", "a_val*")
    os.mkdir(f"{tmp}/folder.bin")
    refused("not a regular file|folder.bin", "-i", "folder.bin", "-j", "a_val*")
    for i, (says, damage) in enumerate(damaged(raw, "shard")):
        name = write(f"shard{i}.bin", damage)
        refused(f"{name}|{says}", "-i", name, "-j", "a_val*")
        refused(f"{name}|{says}", "-i", "a_train*", "-j", name, "-v", 1)
    refused("0 tokens", "-i", write("zero.bin", words(raw, w2=0)[:1024]), "-j", "a_val*")
    refused("-5 tokens", "-i", write("minus.bin", words(raw, w2=-5)), "-j", "a_val*")
    refused("64 tokens|65 are needed|works", "-i", shard("short.bin", [1] * 64), "-j", "a_val*")
    refused("token 256 at position 7|V=256", "-i", shard("high.bin", [9] * 7 + [256] + [9] * 57), "-j", "a_val*",
            left=["main.log"])
    refused("token 70000 at position 64|V=256", "-i", shard("high32.bin", [9] * 64 + [70000], True), "-j",
            "a_val*", "--tp", 2, left=["main.log"])
    write("sound.bin", read("five.bin"))
    refused("nothere.bin|No such file", "-x", 1, model="nothere.bin")
    refused("rank 0 needs|parameters|activations|is too much: a smaller model", "-x", 1, "-i", "a_train*",
            model="gpt3:c12288")
    for i, (says, damage) in enumerate(damaged(read("five.bin"), "model")):
        name = write(f"model{i}.bin", damage)
        refused(f"{name}|{says}", "-x", 1, model=name)
    for says, change in (("V=-1", dict(w3=-1)), ("L=0", dict(w4=0)), ("NH=5", dict(w5=5)), ("Vp=300", dict(w7=300)),
                         ("bytes", dict(w4=2)), ("maxT=", dict(w2=2000000000))):
        refused(f"changed.bin|{says}", "-x", 1, model=write("changed.bin", words(read("five.bin"), **change)))
    for i, (says, damage) in enumerate(damaged(read("a_tokenizer.bin"), "tokenizer")):
        name = write(f"tokenizer{i}.bin", damage)
        refused(f"--prompt|{name}|{says}", "--tokenizer", name, "--prompt", "x")
        if i == 2:
            succeeds(train("-x", 1, "-s", 1, "--tokenizer", name))  # without a prompt it is not needed
    ascii = read("a_tokenizer.bin")[:1024] + b"".join(b"\2%c%c" % (i, i) for i in range(1, 257) if i < 256) + b"\1a"
    refused("the prompt has a byte", "--tokenizer", write("odd.bin", ascii), "--prompt", "b")
    refused("10 tokens", "--tokenizer", "a_tokenizer.bin", "--prompt", "0123456789", "-g", 10)
    refused("256 tokens|V=200", "--tokenizer", "a_tokenizer.bin", "--prompt", "x",
            model="L=1,C=32,NH=4,V=200,maxT=64")


def bad_state():
    """A damaged checkpoint is never loaded: an older one is, or a line says why none."""
    succeeds(train("-x", 2, "-o", "kept"))
    raw = read("kept/state_00000002.bin")
    cases = [(says, "state", d) for says, d in damaged(raw, "state")] + [("", "model", read("five.bin")[:-2])]
    cases += [("is of step 7", "state", words(raw, w2=7)), ("NH=2", "state", words(raw, w6=2)),
              ("header is damaged", "state", words(raw, w15=7)), ("bytes", "state", words(raw, w16=8))]
    for i, (says, kind, damage) in enumerate(cases):
        folder = f"hurt{i}"
        shutil.copytree(f"{tmp}/kept", f"{tmp}/{folder}")
        write(f"{folder}/{kind}_00000002.bin", damage)
        refused(f"--resume 1|step 2|{kind}_00000002.bin|{says}", "-x", 4, "-y", 1, "-o", folder, folder=folder)
    shutil.copytree(f"{tmp}/kept", f"{tmp}/window")  # where the window of losses, 128 of them, goes on
    write("window/state_00000002.bin", words(raw, w539=1 << 20))
    refused("state_00000002.bin: is damaged|windows", "-x", 4, "-y", 1, "-o", "window", folder="window")
    shutil.copytree(f"{tmp}/kept", f"{tmp}/two")
    succeeds(train("-x", 4, "-y", 1, "-o", "two"))
    shutil.copytree(f"{tmp}/two", f"{tmp}/twohurt")
    write("twohurt/state_00000004.bin", read("two/state_00000004.bin")[:-1])
    run = succeeds(train("-x", 4, "-y", 1, "--tp", 2, "-o", "twohurt"))
    check("step 4 passed over" in run.out and "resuming at step 2" in run.out, f"the older one: {run.out}")
    shutil.copytree(f"{tmp}/kept", f"{tmp}/reshaped")
    run = succeeds(train("-x", 4, "-y", 1, "-b", 2, "-o", "reshaped"))
    check("note: a step's batch was 64 tokens and is 32: the data go on at token 128" in run.out, f"a note: {run.out}")
    refused("another number of shards", "-x", 4, "-y", 1, "-i", "many_train*", "-j", "a_val*", "-o", "kept",
            folder="kept")
    run = succeeds(train("-x", 1, "-y", 1, "-o", "fresh"))
    check("resuming" not in run.out and steps("fresh") == [1], "nothing to resume: it begins")


def bad_sizes():
    refused("-t 65|64", "-t", 65)
    refused("--total-batch 96|64", "-d", 96)
    refused("--tp 5|4 heads", "--tp", 5, "-b", 5)
    refused("--tp 9|4 heads", "--tp", 9, "-b", 9)
    refused("--tp|17|16", "--tp", 17)
    refused("--tp 3|B=4|T=16|-b 6|-t 12", "--tp", 3)
    refused("--overlap flash:5|32 tokens", "--tp", 2, "--overlap", "flash:5")
    refused("C=33|NH=4", model="L=1,C=33,NH=4")
    refused("L=0", model="L=0,C=32,NH=4")
    refused("d13|12", model="d13")
    refused("do not make one step|-d 6400000", "-x", -1, "-d", 6400000)
    refused("tokens", "-b", 1 << 20, "-t", 1 << 20)
    refused("50 tokens|65 are needed", "-i", "a_train*", "-j", shard("v.bin", [1] * 50), "-v", 1)


def bad_options():
    for says, *args in (("-xq", "-xq", 5), ("--steps", "--steps", 5), ("-x '5x'|whole number", "-x", "5x"),
                        ("-x ''", "-x", ""), ("-x '-2'|-1", "-x", -2), ("-x '1e3'", "-x", "1e3"),
                        ("-x '99999999999'", "-x", "99999999999"), ("-l 'nan'", "-l", "nan"),
                        ("-l '-1'", "-l", -1), ("twice", "-x", 1, "-x", 2), ("-x needs a value", "-x", "-y", 1),
                        ("--overlap 'slice'", "--overlap", "slice"), ("'flash:0'", "--overlap", "flash:0"),
                        ("'flush'", "--overlap", "flush"), ("--wire 'fp8'", "--wire", "fp8"),
                        ("--topology 'torus'|ring", "--topology", "torus"), ("--sp '2'", "--sp", 2),
                        ("bf16 weights alone", "-w", 0), ("'train'", "train"), ("-k", "-k", "sine"),
                        ("--seed", "--seed", "0x10"), ("--dry-run takes no value", "--dry-run=1"),
                        ("-y|--out", "-y", 1), ("--checkpoint-every|--out", "-n", 1)):
        run = Run(*args, quick=False).wait()
        check(run.rc == 1 and run.err.count("\n") == 1 and run.out == "", f"{args}: {run.rc} {run.err}")
        for part in says.split("|"):
            check(part in run.err or part == "-y", f"'{part}' is said: {run.err}")
    refused("--link '5'", "--link", 5, quick=False)
    refused("--pace '-1'", "--pace", -1, quick=False)


def bad_folders():
    write("file", b"x")
    for says, folder in (("Not a directory", "file/deep"), ("is not a folder", "file"), ("/proc/x", "/proc/x"),
                         ("characters", "d" * 1200), ("File name too long", "d" * 300), ("missing", "no/such/dir")):
        run = train("-x", 1, "-o", folder).wait()
        check(run.rc == 1 and run.err.count("\n") == 1 and says in run.err, f"{says}: {run.err}")
    check(read("file") == b"x" and not os.path.exists(f"{tmp}/no"), "no folder is touched")


def disk_full():
    """Neither half a file nor the loss of the checkpoint before."""
    succeeds(train("-x", 2, "-o", "full"))
    sizes = [os.path.getsize(f"{tmp}/full/{kind}_00000002.bin") for kind in ("model", "state")]
    for tp, most in ((1, sizes[0] - 1), (2, sizes[1] - 1), (1, 2000), (4, sizes[1] // 2)):
        run = refused(".bin|File too large", "-x", 4, "-y", 1, "--tp", tp, "-o", "full", folder="full",
                      left=["main.log"], most_file=most)
    succeeds(train("-x", 4, "-y", 1, "-o", "full"))
    check(steps("full") == [2, 4], f"the old one could be resumed: {steps('full')}")
    os.mkdir(f"{tmp}/disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={3 * sizes[1]}", "none", f"{tmp}/disk"],
                             stderr=subprocess.DEVNULL).returncode == 0
    if mounted:  # as root, where that is allowed
        try:
            run = train("-x", 1000000, "-n", 1, "-o", "disk/run").wait()
            check(run.rc == 1 and "No space left" in run.err and run.err.count("\n") == 1, f"{run.rc} {run.err}")
            names = listing_names("disk/run")
            check(len(names) == 3 * len(steps("disk/run")) + 1, f"whole checkpoints: {names}")
            shutil.rmtree(f"{tmp}/disk/run")
            subprocess.run(["mount", "-o", "remount,ro", f"{tmp}/disk"], check=True)
            run = train("-x", 1, "-o", "disk").wait()
            check(run.rc == 1 and "Read-only" in run.err and run.err.count("\n") == 1, f"{run.rc} {run.err}")
        finally:
            subprocess.run(["umount", f"{tmp}/disk"])


def not_a_number():
    raw = bytearray(read("three.bin"))
    for value in ("nan", "inf"):
        struct.pack_into("<f", raw, len(raw) - 4, float(value))  # of the last layer norm's bias
        write(f"{value}.bin", bytes(raw))
        for tp in (1, 2):
            run = train("-x", 2, "--tp", tp, "-o", f"{value}{tp}", model=f"{value}.bin").wait()
            last = run.err.splitlines()[-1]
            said = last.startswith("step 1: the loss is") and "--ignore-nan" in last
            check(run.rc == 1 and said, f"{value}: {run.err}")
            check("first on the forward pass in lnfb (1 of " in run.err, f"what is not finite: {run.err}")
            check(sorted(listing(f"{value}{tp}")) == ["main.log", "nan_1.txt"], f"left: {listing(f'{value}{tp}')}")
    run = succeeds(train("-x", 2, "--ignore-nan", 1, model="nan.bin"))
    check(re.search("step +2/2 . loss +-?nan", run.out), f"it goes on: {run.out[-300:]}")


def test_bad_input():
    at_once(bad_files, bad_state, bad_sizes, bad_options, bad_folders, disk_full, not_a_number)
    if MPI:
        refused("2 processes were started|--tp 4|want 4", "--tp", 4, np=2)
        refused("asked for 2 ranks|4 processes", "--dp", 1, "--tp", 2, np=4)
        refused("unknown option|-xq", "--tp", 2, "-xq", 1, np=2)
        refused("nothere.bin|No such file", "--tp", 2, np=2, model="nothere.bin")


# ---- killed ranks ------------------------------------------------------------------------------------------
def processes(*each):
    """mpirun of one process for each list of options."""
    command = ["mpirun", "--oversubscribe"]
    for i, args in enumerate(each):
        command += [":"] * (i > 0) + ["-np", "1", PROGRAM, *data(), "-e", MODEL, "-v", "0", "-s", "0", *map(str, args),
                                      *QUICK]
    return Run(command=command)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_killed():
    if not MPI:
        return
    for sig in (signal.SIGKILL, signal.SIGSEGV):
        run = train("-x", 1000000, "--tp", 3, "-b", 3, "-o", f"killed{sig}", np=3)
        run.wait_for("step    2/")
        victims = run.ranks()
        killed = time.time()
        os.kill(victims[1], sig)
        run.wait()
        check(run.rc != 0 and time.time() - killed < 25, f"{time.time() - killed:.1f} s, exit status {run.rc}")
        check("signal" in run.err, f"the cause is said: {run.err}")
        while time.time() - killed < 25 and any(alive(pid) for pid in victims):
            time.sleep(0.1)
        check(not any(alive(pid) for pid in victims), "every rank has ended")

    def disagree():  # a bug of the caller: the ranks' messages do not match
        run = processes(["--tp", 2, "-b", 4, "-t", 16, "-x", 9], ["--tp", 2, "-b", 2, "-t", 16, "-x", 9]).wait()
        check(run.rc != 0 and run.seconds < 25 and "expects" in run.err, f"{run.seconds:.1f} s: {run.err}")

    def alone():  # only one rank does not find its data
        run = processes(["--tp", 2, "-b", 4, "-t", 16, "-x", 9], ["--tp", 2, "-b", 4, "-t", 16, "-x", 9])
        run.wait()
        check(run.rc == 0, f"the same options one by one: {run.err}")
        run = processes(["--tp", 2, "-b", 4, "-t", 16, "-x", 9], ["--tp", 2, "-b", 4, "-t", 65, "-x", 9]).wait()
        check(run.rc != 0 and run.seconds < 25 and "-t 65" in run.err, f"{run.seconds:.1f} s: {run.err}")

    at_once(disagree, alone)


# ---- odd sizes ---------------------------------------------------------------------------------------------
def test_odd():
    ones = shard("ones.bin", [0] * 40)
    exact = shard("exact.bin", [i % 7 for i in range(65)])
    shard("size_1.bin", [1, 2, 3] * 30)
    shard("size_2.bin", [4, 5] * 200)
    high = shard("high33.bin", [199999, 5] * 40, wide=True)
    os.mkdir(f"{tmp}/a b")
    shutil.copy(f"{tmp}/a_train_000001.bin", f"{tmp}/a b/my train.bin")
    os.chmod(f"{tmp}/a b/my train.bin", 0o444)
    tiny = "L=1,C=8,NH=8,V=256,maxT=64"
    cases = [
        (["-b", 1, "-t", 2, "-x", 2], tiny), (["-b", 1, "-t", 1, "-x", 2], "L=1,C=8,NH=2,V=256,maxT=1"),
        (["-b", 8, "-t", 2, "-x", 2, "--tp", 8], tiny), (["-b", 1, "-t", 16, "-x", 2, "--tp", 8], tiny),
        (["-b", 1, "-t", 1, "-x", 2, "-g", 9, "-s", 1, "-v", 1], "L=1,C=1,NH=1,V=256,maxT=8"),
        (["-b", 2, "-t", 4, "-x", 2, "-i", ones, "-j", ones, "-s", 1, "-v", 1], "L=1,C=8,NH=2,V=1,maxT=8"),
        (["-b", 2, "-t", 4, "-x", 2, "-i", ones, "-j", ones, "-s", 1, "--tp", 2], "L=1,C=8,NH=2,V=2,maxT=8"),
        (["-b", 2, "-t", 8, "-x", 1, "-i", high, "-j", high, "-s", 1, "--tp", 2], "L=1,C=8,NH=2,V=200000,maxT=8"),
        (["-x", 3, "-i", exact, "-j", exact, "-v", 1, "-m", -1], MODEL),
        (["-x", 9, "-b", 1, "-i", "size_*", "-j", exact, "-v", 1], MODEL),
        (["-x", 2, "-i", "a b/my *.bin", "-j", "a_val*", "-o", "a b/out put", "-n", 1], MODEL),
        (["-x", 0, "-v", 1, "-s", 1], MODEL), (["-x", 1, "-v", 100, "-s", 100, "-g", 1], MODEL),
        (["-x", 2, "-g", 99, "-s", 1, "--tp", 3, "-b", 1, "-t", 48, "--overlap", "flash:4"], MODEL),
        (["-x", 2, "--prompt", "", "-s", 1, "--top-k", 999], MODEL), (["-x", 2, "-a", 1, "-d", 256], MODEL),
        (["-x", 2, "--overlap", "slice:16", "-b", 1, "-t", 3], MODEL),
        (["-b", 2, "-t", 2, "-x", 2, "-s", 1, "--tp", 2, "--overlap", "flash:2"], tiny),  # no room for a sample
    ]

    def one(args, model):
        run = succeeds(train(*args, model=model))
        check("nan" not in re.sub(r"\(\+nanz\)", "", run.out).replace("norm -nan", ""), f"{run.name}: {run.out[-300:]}")

    at_once(*(lambda c=c: one(*c) for c in cases))
    check(steps("a b/out put") == [1, 2], "a folder with blanks")
    twice = [train("-x", 2, "-o", "shared") for _ in range(2)]  # at once, in one folder
    for run in twice:
        run.wait()
        check(run.rc in (0, 1) and (run.rc == 0 or run.err.count("\n") == 1), f"{run.rc} {run.err}")


main((test_new_weights, test_modes, test_ranks, test_formats, test_resume, test_bad_input, test_killed, test_odd,
      test_dry_run), make_models)
