#!/usr/bin/python3
"""Kills training runs by SIGKILL at random points, checkpoints being most of what they do, and resumes them until they are
done: each goes on from the newest complete checkpoint, and in the end all files are those of a run that was left alone,
bit for bit. And: one run at a time in a folder. KILLS=50: as many of each kind (5); KILL_SEED: of the random points.
"""

import glob, os, random, re, shutil, signal, time

from program import (DEVICE, MPI, check, listing, listing_names, main, steps, succeeds, tmp, train)

KILLS = int(os.environ.get("KILLS", 5))
SEED = int(os.environ.get("KILL_SEED", time.time_ns() % 1000000))
STEPS, KEPT = 20, 2
# checkpoints of 6 MB, and steps of a few ms between them
RUN = ["-x", STEPS, "-n", 1, "-d", 128, "-c", "0.1", "-l", "1e-3", "-i", "many_train*", "-j", "many_val*"]
# what killed processes of Open MPI leave behind goes with the test's folder
os.environ.update(OMPI_MCA_btl_vader_backing_directory=tmp, OMPI_MCA_orte_tmpdir_base=tmp)
TP, ZERO = ("--tp", 2), ("--dp", 2, "-z", 1)


def of_session(leader):
    """The processes that a run consists of: its own, and those that mpirun has started."""
    found = set()
    for stat in glob.glob("/proc/[0-9]*/task/*/stat"):  # each thread: the first may be gone, others in the kernel
        try:
            with open(stat) as f:
                words = f.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[3]) == leader and words[0] not in "ZX":
            found.add(int(stat.split("/")[2]))
    return found


def kill_all(run):
    """Like a machine that loses its power, but for what the kernel has not yet written."""
    while left := of_session(run.process.pid):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.001)


def kill_one(run):
    """One process alone; the launcher ends the others."""
    left = of_session(run.process.pid)
    if len(left) > 1:
        os.kill(max(left), signal.SIGKILL)
        end = time.time() + 60
        while of_session(run.process.pid) and time.time() < end:
            time.sleep(0.005)
    kill_all(run)


def random_point(rng, run, folder, seconds):
    """Waits for any moment of a run that would take `seconds`, or for one in which a file is written."""
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, seconds / 2))
        return
    while not run.ended() and not any(f.endswith(".tmp") for f in listing_names(folder)):
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.02))


def logged(folder):
    """{step: set of its losses} of a main.log, of which the last line may be cut."""
    losses = {}
    with open(f"{tmp}/{folder}/main.log") as f:
        for step, loss in re.findall(r"s:(\d+) trl:(\S+) lr:\S+ norm:\S+\n", f.read()):
            losses.setdefault(int(step), set()).add(loss)
    return losses


def sound(folder, good, what):
    """What is complete is as in the run that was left alone; no more is kept than should be. The newest step."""
    files, done = listing(folder), steps(folder)
    for step in done[-KEPT:]:
        for name in (f"model_{step:08d}.bin", f"state_{step:08d}.bin"):
            check(files.get(name) == good[name], f"{what}: {name} is complete")
    # two that are not yet deleted, one under way, main.log, the lock
    check(len(files) <= 3 * (KEPT + 3) + 2, f"{what}: nothing piles up: {sorted(files)}")
    return max(done, default=0)


def interrupted(kind, np):
    name = "".join(map(str, kind)).replace("-", "") + ("mpi" if np else "")
    model = "L=2,C=128,NH=4,V=256,maxT=64"
    args = [*RUN, *kind]
    start = time.time()
    succeeds(train(*args, "-o", f"{name}-good", model=model, np=np))
    seconds = time.time() - start
    good, losses = listing(f"{name}-good"), logged(f"{name}-good")
    rng, folder, kills, finished, during = random.Random(SEED), f"{name}-killed", 0, 0, 0
    newest = 0
    while kills < KILLS or newest < STEPS:
        what, killed = f"{name}, KILL_SEED={SEED}, kill {kills}", False
        run = train(*args, "-nk", KEPT, "-y", 1, "-o", folder, model=model, np=np)
        if kills < KILLS:
            random_point(rng, run, folder, seconds)
            if not run.ended():
                kills, killed = kills + 1, True
                (kill_one if np and rng.random() < 0.5 else kill_all)(run)
        run.wait()
        during += any(f.endswith(".tmp") for f in listing_names(folder))
        said = re.search(r"resuming at step (\d+)", run.out)
        check(not said or int(said.group(1)) == newest, f"{what}: goes on at {newest}: {said}")
        if "passed over" in run.out or run.rc != 0 and not killed:
            return check(False, f"{what}: {run.out} {run.err}")
        before, newest = newest, sound(folder, good, what) if listing_names(folder) else 0
        check(newest >= before, f"{what}: no complete checkpoint is lost: {before}, {newest}")
        if newest == STEPS and kills < KILLS:  # and again, from the start
            check(run.rc is not None and logged(folder)[STEPS - 1] == losses[STEPS - 1], f"{what}: the last loss")
            shutil.rmtree(f"{tmp}/{folder}")
            newest, finished = 0, finished + 1
    files = listing(folder)
    for step, seen in logged(folder).items():
        check(seen == losses[step], f"{name}: the loss of step {step}: {seen}, {losses[step]}")
    want = {f for step in (STEPS - 1, STEPS) for f in (f"DONE_{step:08d}", f"model_{step:08d}.bin",
                                                       f"state_{step:08d}.bin")}
    check(set(files) == want | {"main.log"}, f"{name}: nothing is left over: {sorted(files)}")
    for file in want:
        check(files.get(file) == good[file], f"{name}: {file} as in a run that was left alone")
    print(f"{name}: {kills} kills, {during} of them during a file, in {finished + 1} runs of {STEPS} steps", flush=True)


def test_kill():
    interrupted(TP, 0)
    interrupted(ZERO, 0)
    if MPI and DEVICE == "cpu":
        interrupted(TP, 2)


def test_lock():
    """A second run in a folder touches nothing, whatever it would do there; a killed one stands in nobody's way."""
    args = ["-x", 1000000, "-n", 5, "-nk", 3, "-o", "shared"]
    run = train(*args)
    run.wait_for("step    6/")
    inode = os.stat(f"{tmp}/shared/main.log").st_ino
    for np in (0, 2) if MPI and DEVICE == "cpu" else (0,):
        second = train("-x", 4, "-y", np // 2, "-o", "shared", np=np).wait()
        said = [x for x in second.err.splitlines() if "output folder shared" in x]
        check(second.rc != 0 and len(said) == 1 and f"process {run.process.pid} on " in said[0],
              f"one line names the first: {second.err}")
    check(not run.ended() and os.stat(f"{tmp}/shared/main.log").st_ino == inode, "the first goes on")
    kill_all(run)
    run.wait()
    newest = max(steps("shared"))
    last = succeeds(train("-x", newest + 2, "-y", 1, "-o", "shared"))
    check(f"resuming at step {newest}" in last.out, last.out)
    check("train_gpt.lock" not in listing_names("shared"), "the lock is gone")


main((test_kill, test_lock))
