#!/usr/bin/python3
"""The recipes scripts/run_*.sh: their settings are llm.c's and their arithmetic is right; runs that crash, are stopped,
or can't begin go on, end, or are given up as scripts/run_common.sh says.
"""

import os, re, shlex, signal, stat, subprocess, sys, time

from program import MODEL, MPI, PROGRAM, QUICK, Run, check, listing, losses, main, read, same, shard, steps, succeeds, tmp

# L, NH, C, maxT of the models by name
SIZES = {"d12": (12, 12, 768, 1024), "d24": (24, 16, 1024, 1024), "d36": (36, 20, 1280, 1024), "d48": (48, 25, 1600, 1024),
         "gpt3:c768": (12, 12, 768, 2048), "L=12,C=768,NH=12,maxT=16384": (12, 12, 768, 16384)}
EIGHT = {"--dp": "8", "--up": "1", "--tp": "1", "-z": "1", "-r": "0", "-y": "1", "-t": "1024", "-c": "0.1", "-u": "700",
         "-v": "250", "-k": "cosine"}
SETTINGS = {
    "124M": {"-e": "d12", "-b": "64", "-d": "524288", "-x": "18865", "-l": "6e-4", "-q": "0", "-n": "5000"},
    "350M": {"-e": "d24", "-b": "64", "-d": "524288", "-x": "60000", "-l": "3e-4", "-q": "0", "-n": "2000"},
    "774M": {"-e": "d36", "-b": "32", "-d": "524288", "-x": "286102", "-l": "2.5e-4", "-q": "0", "-n": "4000"},
    "1558M": {"-e": "d48", "-b": "16", "-d": "1048576", "-x": "32000", "-l": "6e-4", "-q": "0.1", "-n": "2000"},
    "gpt3_125M": {"-e": "gpt3:c768", "-b": "32", "-d": "524288", "-x": "572204", "-l": "6e-4", "-q": "0.1", "-n": "10000",
                  "-t": "2048", "-sl": "7", "-sg": "7", "-nk": "5", "-nm": "50000"},
    "long_context": {"-e": "L=12,C=768,NH=12,maxT=16384", "-t": "16384", "--up": "4", "--dp": "2", "-d": "524288"},
    "2_nodes": {"-e": "d12", "-b": "64", "-d": "2097152", "-x": "4716", "-q": "0.1", "--dp": "16"},
    "slurm": {"-e": "d12", "-b": "32", "-d": "524288", "-x": "18865", "--dp": "16"},
}
LAUNCHED = {"2_nodes": "mpirun --bind-to none -np 16 --host a:8,b:8", "slurm": "srun --mpi=pmix"}


def recipe(name, *args, **env):
    return Run(command=[os.path.abspath(f"scripts/run_{name}.sh"), *map(str, args)],
               env={"PROGRAM": PROGRAM, **{k: str(v) for k, v in env.items()}})


def number(pattern, text):
    found = re.search(pattern, text, re.M)
    check(found, f"'{pattern}' is said: {text}")
    return float(found.group(1)) if found else float("nan")


def near(a, b, what, digits=0.01):
    check(abs(a - b) <= digits * abs(b), f"{what}: {a}, {b} is right")


# ---- arithmetic --------------------------------------------------------------------------------------------
def arithmetic(name, want):
    run = succeeds(recipe(name, "--dry-run", HOSTS="a,b", OUT=f"{tmp}/none", TOK_S=123456))
    words = shlex.split(re.search("^command +(.*)", run.out, re.M).group(1))
    at = words.index(PROGRAM)
    check(" ".join(words[:at]) == LAUNCHED.get(name, ""), f"{name} is started by {words[:at]}")
    options = dict(zip(words[at + 1::2], words[at + 2::2]))
    for option, value in {**EIGHT, **want}.items():
        check(options.get(option) == value, f"{name}: {option} {options.get(option)}, not {value}")
    L, _, C, maxT = SIZES[options["-e"]]
    dp, up, T, B, step, n = (int(options[o]) for o in ("--dp", "--up", "-t", "-b", "-d", "-x"))
    parameters = (50304 + maxT) * C + L * (12 * C * C + 13 * C) + 2 * C
    tokens, flops = n * step, 6 * parameters + 6 * L * C * T
    check(number(r"(\d+) parameters", run.out) == parameters, f"{name}: {parameters} parameters: {run.out}")
    check(number(r"^tokens +(\d+):", run.out) == tokens, f"{name}: tokens")
    check(f"{step} tokens: {step // (B * T * dp)} times {B} sequences" in run.out, f"{name}: micro-steps: {run.out}")
    near(number(r"^compute +(\S+)", run.out), tokens * flops, f"{name}: compute")
    near(number(r"^time +(\S+) hours", run.out), tokens / 123456 / 3600, f"{name}: hours")
    near(number(r"(\d+) ms a step", run.out), 1000 * step / 123456, f"{name}: a step")
    each = 2 * 1024 + (2 if "BF16" in PROGRAM else 4) * parameters + 12 * parameters
    every, keep, major = (int(options[o]) for o in ("-n", "-nk", "-nm"))
    written = set(range(every, n + 1, every)) | {n}
    most = len(written)
    if keep:  # the newest, one that is being written, and those that stay
        most = min(most, keep + 1 + len([s for s in written if s % major == 0]))
    check(number(r"^checkpoints +(\d+)", run.out) == most, f"{name}: {most} checkpoints: {run.out}")
    near(number(r"most of (\S+) GB", run.out), each / 1e9, f"{name}: a checkpoint")
    near(number(r", (\S+) GB in", run.out), most * each / 1e9, f"{name}: all checkpoints")
    plan = succeeds(Run(*words[at + 1:], "--dry-run", quick=False)).out
    largest = max(float(x) for x in re.findall(r"in all (\S+) MiB", plan))
    near(number(r"^memory +(\S+) GiB", run.out), largest / 1024, f"{name}: memory")
    made = re.search(r"^note: no (data/\S+)/(\w+)_train_\*.bin; this makes it: python3 data/prepare.py (\w+)$", run.out, re.M)
    check(made, f"{name}: data are missing: {run.out}")
    # the set exists, and its files are called as the recipe expects
    said = subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, 'data'); import prepare; "
                           f"print('data/{made[3]}', prepare.SETS['{made[3]}']['name'])"], capture_output=True, text=True)
    check(said.stdout.split() == [made[1], made[2]], f"{name}: {made[0]}: {said.stdout} {said.stderr}")
    check(not os.path.exists(f"{tmp}/none"), f"{name}: nothing is made")
    rate = number(r"at (\d+) tokens a second", succeeds(recipe(name, DRY=1, HOSTS="a,b", PEAK=100, MFU=0.25)).out)
    near(rate, dp * up * 100e12 * 0.25 / flops, f"{name}: tokens a second")


def test_arithmetic():
    for name, want in SETTINGS.items():
        arithmetic(name, want)
    left = {f[4:-3] for f in os.listdir("scripts") if re.match(r"run_.*\.sh", f)} - set(SETTINGS) - {"common"}
    check(not left, f"each recipe is tested: {left}")
    for name, value in (("EVERY", "08"), ("PAUSE", ""), ("PEAK", "x"), ("TOK_S", "0"), ("STEPS", "9" * 20)):
        run = small("124M", DRY=1, **{"STEPS": 5, name: value}).wait()
        check(run.rc == 1 and run.err.count("\n") == 1 and f"{name} '{value}': want" in run.err, f"{name}: {run.err}")
    shard("two_train_000000.bin", [1] * 5000)
    shard("two_train_000001.bin", [1] * 3000)
    run = succeeds(small("124M", DRY=1, SHARDS="two", STEPS=500))  # 32 tokens a step
    check("data         8000 tokens" in run.out and "2.00 epochs" in run.out, f"epochs: {run.out}")
    shard("four_train_000000.bin", [1] * 4000, wide=True)
    run = succeeds(small("124M", DRY=1, SHARDS="four", STEPS=500))
    check("data         4000 tokens" in run.out and "4.00 epochs" in run.out, f"epochs: {run.out}")


# ---- runs --------------------------------------------------------------------------------------------------
def small(name, *args, **env):
    """The recipe on 2 ranks, with a model that takes no time."""
    settings = {"MODEL": MODEL, "RANKS": 2, "BATCH": 1, "SEQ": 16, "TOTAL": 32, "DATA": tmp, "SHARDS": "a", "STEPS": 300,
                "EVERY": 30, "LR": "1e-3", "WARMUP": 5, "VAL_EVERY": 0, "RECOMPUTE": 1, "PAUSE": 0, "OUT": f"{tmp}/none"}
    return recipe(name, *QUICK, *args, **{**settings, **env})


def program(name, body):
    """A program in train_gpt's place: it hands --dry-run on, counts how often it was started, n, and does `body`."""
    path = f"{tmp}/{name}"
    with open(path, "w") as f:
        f.write(f"#!/bin/bash\nreal={PROGRAM} count={path}.count\n"
                'for a in "$@"; do [[ $a != --dry-run ]] || exec "$real" "$@"; done\n'
                f'echo >>"$count"; n=$(wc -l <"$count")\n{body}\n')
    os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
    return path


def starts(name):
    return read(f"{name}.count").count(b"\n") if os.path.exists(f"{tmp}/{name}.count") else 0


# kills the program as soon as a file is there, and ends as a killed one does
KILLED = '"$real" "$@" & child=$!; until [[ -e {file} ]]; do sleep 0.002; done; kill -9 $child; wait $child'


def test_crash():
    """Killed in the middle, a run goes on, and ends in the same bits as one that was not."""
    succeeds(small("124M", OUT=f"{tmp}/whole"))
    crash = program("crash", f'if ((n == 1)); then {KILLED.format(file=tmp + "/hurt/DONE_00000030")}; exit 137; fi\n'
                    'exec "$real" "$@"')
    run = succeeds(small("124M", PROGRAM=crash, OUT=f"{tmp}/hurt"))
    check(starts("crash") == 2, f"started {starts('crash')} times: {run.err}")
    check("exit status 137; starting again in 0 s, 1 of 5" in run.err, run.err)
    check(re.search(r"resuming at step [0-9]+0$", run.out, re.M), f"it goes on from a checkpoint: {run.out[-2000:]}")
    check(run.out.endswith("DONE_00000300 is there: the run is complete\n"), run.out[-300:])
    logged = [set(re.findall(rb'"step": ?(\d+)', read(f"{folder}/log.json"))) for folder in ("whole", "hurt")]
    check(logged[0] == logged[1] and len(logged[0]) >= 300, f"log.json has all steps: {[len(x) for x in logged]}")
    for folder in ("whole", "hurt"):
        os.remove(f"{tmp}/{folder}/log.json")  # it has times
    same("whole", "hurt", "killed and gone on")
    run = succeeds(small("124M", PROGRAM=crash, OUT=f"{tmp}/hurt"))
    check(starts("crash") == 2, "a complete run is not started again")


def test_given_up():
    """An error at once ends the loop with it; crashes without progress end it after a few, with growing pauses."""
    run = small("124M", PROGRAM=program("short", 'exec "$real" "$@"'), SHARDS="one", OUT=f"{tmp}/bad").wait()
    check(run.rc == 1 and starts("short") == 1, f"status {run.rc}, started {starts('short')} times: {run.err}")
    check("one_train_000000.bin" in run.err and "no step was done (exit status 1): not started" in run.err, run.err)
    run = small("124M", "--no-such", 1, OUT=f"{tmp}/bad").wait()
    check(run.rc == 1 and "unknown option '--no-such'" in run.err, f"{run.rc}: {run.err}")
    run = small("124M", PROGRAM=f"{tmp}/nothing").wait()
    check(run.rc == 1 and "nothing is missing: make" in run.err, f"{run.rc}: {run.err}")
    run = small("124M", SHARDS="none").wait()
    check(run.rc == 1 and "this makes it: python3 data/" in run.err, f"{run.rc}: {run.err}")
    run = small("124M", PROGRAM=program("lazy", "exit 0"), OUT=f"{tmp}/lazy_out").wait()
    check(run.rc == 1 and "ended well, but" in run.err and starts("lazy") == 1, f"{run.rc}: {run.err}")

    write_sleep()
    always = program("always", f'mkdir -p {tmp}/ever; echo "s:$n trl:1" >>{tmp}/ever/main.log\n'
                     f'if ((n == 3)); then touch {tmp}/ever/DONE_00000010; fi; exit 134')
    run = small("124M", PROGRAM=always, OUT=f"{tmp}/ever", PAUSE=7, MAX_PAUSE=20, TRIES=5,
                PATH=f"{tmp}/bin:{os.environ['PATH']}").wait()
    check(run.rc == 134 and starts("always") == 7, f"status {run.rc}, started {starts('always')} times: {run.err}")
    slept = read("slept").split()
    check(slept == [b"7", b"14", b"7", b"14", b"20", b"20"], f"pauses: {slept}")
    check("ended 5 times without a new checkpoint (exit status 134): giving up" in run.err, run.err)


def write_sleep():
    os.makedirs(f"{tmp}/bin", exist_ok=True)
    with open(f"{tmp}/bin/sleep", "w") as f:
        f.write(f'#!/bin/bash\necho "$1" >>{tmp}/slept\n')
    os.chmod(f"{tmp}/bin/sleep", 0o755)


def interrupted(name, sig, rc, **env):
    """A signal to the script, as a terminal or a batch system sends it: a checkpoint is written, nothing follows."""
    out = f"{name}_out"
    run = small("124M", OUT=f"{tmp}/{out}", STEPS=30000, EVERY=30000, **env)
    run.wait_for("step    3/30000", 120)
    programs = run.ranks()
    os.kill(run.process.pid, sig)
    run.wait(180)
    for pid in programs:  # they are in groups of their own
        if run.rc is None and os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGKILL)
    check(run.rc == rc and len(steps(out)) == 1, f"{name}: status {run.rc}, checkpoints {steps(out)}: {run.err}")
    check("Writing checkpoint" in run.out and "starting again" not in run.err, f"{name}: {run.out[-300:]} {run.err}")


def test_stopped():
    interrupted("int", signal.SIGINT, 130)
    interrupted("term", signal.SIGTERM, 143)
    interrupted("usr1", signal.SIGUSR1, 138)
    if MPI:
        interrupted("mpi", signal.SIGTERM, 143, LAUNCH="mpirun --oversubscribe -np 2")
    # in the pause, and a second time for a program that does not end by the first
    fails = program("fails", f'mkdir -p {tmp}/pausing; echo "s:$n trl:1" >>{tmp}/pausing/main.log; exit 134')
    run = small("124M", PROGRAM=fails, OUT=f"{tmp}/pausing", PAUSE=30)
    deaf = small("124M", PROGRAM=program("deaf", "trap '' USR1; echo deaf; while :; do sleep 0.1; done"), OUT=f"{tmp}/deaf_out")
    end = time.time() + 60
    while "starting again" not in run.text(1) and time.time() < end:
        time.sleep(0.01)
    deaf.wait_for("deaf\n")
    os.kill(run.process.pid, signal.SIGINT)
    for _ in range(2):  # as `timeout` does
        os.kill(deaf.process.pid, signal.SIGINT)
        time.sleep(0.1)
    time.sleep(3)
    check(not deaf.ended(), "the first, though it comes twice, waits for a checkpoint")
    os.kill(deaf.process.pid, signal.SIGINT)
    for one in (run, deaf):
        one.wait(120)
        check(one.rc == 130, f"status {one.rc}: {one.err}")


def make_one():
    shard("one_train_000000.bin", [1] * 10)
    shard("one_val_000000.bin", [1] * 10)


if __name__ == "__main__":
    main([test_arithmetic, test_crash, test_given_up, test_stopped], make_one)
