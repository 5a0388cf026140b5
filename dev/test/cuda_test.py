#!/usr/bin/python3
"""The program on the cuda device. Which tests, the build's folder B says: of build/emu-* all that needs no GPU to be seen
(dev/emu/README.md): the same files from every schedule of the emulated device, mode, transport and graph setting, and
each line of a bad machine; of build/cuda-*, where there is no GPU, what the real program says of that.
ONLY=graphs runs test_graphs alone.
"""

import glob, itertools, os, re, shutil, signal, subprocess, time

from program import (DEVICE, MODEL, MPI, PROGRAM, Run, at_once, check, data, losses, main, refused, reported, same, steps,
                     succeeds, tmp, train, write)
from trace_test import Timeline

SMALL = "L=2,C=32,NH=4,V=256,maxT=32"
SCHEDULES = ["eager", "lazy", "random:1", "random:2", "random:3"]
OVERLAPS = ["none", "slice:2", "flash", "flash:2"]
# two micro-steps a step, so four steps launch every graph again after it was made
STEPS = 4
MESHES = {"one": [], "tp2": ["--tp", 2], "tp4": ["--tp", 4], "tp2sp0": ["--tp", 2, "--sp", 0, "--topology", "ring"],
          "up2": ["--up", 2, "-z", 1], "dp2": ["--dp", 2, "-z", 1], "dp2z2": ["--dp", 2, "-z", 2],
          "up2tp2": ["--up", 2, "--tp", 2, "-r", 3], "dp2tp2": ["--dp", 2, "--tp", 2, "-z", 2]}
# a sequence cut in zig-zag; whole ones
SHAPES = {name: (1 if "tp2" == name else 4, 32 if name == "tp2" else 16) for name in MESHES}
FAST = ["-l", "1e-3"]


def ranks_of(args):
    n = 1
    for flag in ("--dp", "--up", "--tp"):
        n *= args[args.index(flag) + 1] if flag in args else 1
    return n


def mesh(name, *args, sched="eager", env=None, **how):
    """A run of one of MESHES, of STEPS steps unless args say so."""
    b, t = SHAPES[name]
    own, args = [*MESHES[name], *FAST], list(args)
    dp = own[own.index("--dp") + 1] if "--dp" in own else 1
    own += [] if "-x" in args else ["-x", STEPS]
    return train(*own, "-b", b, "-t", t, "-d", 2 * dp * b * t, *args, model=SMALL,
                 env={"FO_EMU_SCHED": sched, **(env or {})}, **how)


def alike(name, folder, *args, **how):
    """A run writes what the plain one of this mesh has written."""
    run = succeeds(mesh(name, *args, "-o", folder, **how), 90)
    same(f"{name}ref", folder, run.name)
    check(losses(f"{name}ref") == losses(folder), f"the same losses: {run.name}")
    return run


# ---- the same files ------------------------------------------------------------------------------------------
def make_references():
    """Of each mesh, what all its other runs must write."""
    if DEVICE == "emu":
        at_once(*(lambda n=n: succeeds(mesh(n, "--overlap", "none", "-o", f"{n}ref"), 90) for n in MESHES))
        for name in MESHES:
            check(steps(f"{name}ref") == [STEPS] and len(set(losses(f"{name}ref"))) == STEPS, f"{name} trains")


def test_threads():
    """Neither the mode nor a graph nor the order in which the device does what it may do in any changes a bit."""
    jobs = []
    for i, name in enumerate(MESHES):
        for k, sched in enumerate(SCHEDULES):
            for graph in (0, 1):
                overlap = OVERLAPS[(i + k + 2 * graph) % 4] if ranks_of(MESHES[name]) > 1 else "flash"
                jobs.append((name, f"{name}{graph}{sched}", "--graph", graph, "--overlap", overlap, sched))
    at_once(*(lambda j=j: alike(*j[:-1], sched=j[-1]) for j in jobs))


def test_processes():
    """Two processes, whose messages NCCL carries, write what two threads do."""
    if not MPI:
        return
    jobs = [(name, graph, sched) for name in ("tp2", "dp2") for sched in SCHEDULES for graph in (0, 1)]

    def one(name, graph, sched):
        overlap = OVERLAPS[(SCHEDULES.index(sched) + graph) % 4]
        run = alike(name, f"{name}np{graph}{sched}", "--graph", graph, "--overlap", overlap, sched=sched, np=2)
        check("as processes" in run.out and run.out.count(f"step    1/{STEPS} ") == 1, f"one speaks: {run.out[-300:]}")

    at_once(*(lambda j=j: one(*j) for j in jobs), lambda: alike("up2", "up2np", sched="lazy", np=2))


def test_resume():
    """Half the steps and then the rest, on another device schedule, as other ranks, are the same as all at once."""
    succeeds(mesh("tp2", "-n", 2, "-o", "half"))
    for f in glob.glob(f"{tmp}/half/*0000000{STEPS}*"):
        os.remove(f)
    kinds = [("threads", dict(sched="lazy"), 0), ("graph", dict(sched="random:4"), 1)]
    kinds += [("processes", dict(sched="lazy", np=2), 0)] if MPI else []
    for kind, how, graph in kinds:
        shutil.copytree(f"{tmp}/half", f"{tmp}/half{kind}")
        run = succeeds(mesh("tp2", "-y", 1, "--graph", graph, "-o", f"half{kind}", **how))
        check("resuming at step 2" in run.out, f"{kind}: {run.out[-300:]}")
        for f in glob.glob(f"{tmp}/half{kind}/*00000002*"):
            os.remove(f)
        same("tp2ref", f"half{kind}", f"resumed by {kind}")


def test_trace():
    """Threads, processes and graphs have the same timeline, with rows of computation and communication."""
    runs = {}
    kinds = [("threads", 0, 0), ("graph", 1, 0)] + ([("processes", 0, 2), ("graphs", 1, 2)] if MPI else [])

    def one(kind, graph, np):
        run = succeeds(mesh("tp2", "--trace", f"{kind}.json", "--trace-steps", f"{STEPS}-{STEPS}", "--comm-report",
                            "--graph", graph, "-o", f"trace{kind}", np=np), 90)
        same("tp2ref", f"trace{kind}", f"{kind}: the same bits with a timeline")
        runs[kind] = Timeline(f"{kind}.json", 2), reported(run.out)

    at_once(*(lambda k=k: one(*k) for k in kinds))
    names, report = runs["threads"][0].names(), runs["threads"][1]
    check(len(names) > 50 and any(nmessages for _, nmessages in report["F1"]), f"operations: {names}, {report}")
    for kind, (timeline, said) in runs.items():
        check({row for _, row in timeline.rows} == {"steps", "compute", "comm tp"}, f"{kind}: {list(timeline.rows)}")
        check(timeline.names() == names, f"{kind}: {timeline.names() - names} {names - timeline.names()}")
        check(said == report, f"{kind}: what is sent: {said}, {report}")


# ---- bad machines --------------------------------------------------------------------------------------------
def both_ways(says, *args, **how):
    """Refused to two threads, and to two processes."""
    refused(says, "-x", 2, "--tp", 2, *args, **how)
    if MPI:
        refused(says, "-x", 2, "--tp", 2, *args, np=2, **how)


def test_no_gpu():
    for env in ({"FO_EMU_NO_DRIVER": "1"}, {"FO_EMU_DEVICES": "0"}):
        both_ways("no NVIDIA GPU here|DEVICE=cpu", env=env)
        for args in (["--help"], ["-e", SMALL, "--tp", 2, "--dry-run"]):
            run = Run(*args, env=env).wait()
            check(run.rc == 0 and run.err == "" and len(run.out) > 500, f"{args}: {run.rc} {run.err}")


def test_few_gpus():
    one = {"FO_EMU_DEVICES": "1"}
    both_ways("2 ranks on this machine, 1 GPU: start 1 rank|FO_SHARE_GPUS=1", env=one)
    refused("4 ranks on this machine, 3 GPUs: start 3", "-x", 2, "--tp", 4, env={"FO_EMU_DEVICES": "3"})
    for graph in (0, 1):
        alike("tp2", f"shared{graph}", "--graph", graph, sched="lazy", env={**one, "FO_SHARE_GPUS": "1"})
    alike("up2tp2", "shared4", "--graph", 1, env={"FO_EMU_DEVICES": "3", "FO_SHARE_GPUS": "1"})


def test_connections():
    both_ways("CUDA_DEVICE_MAX_CONNECTIONS=1|unset", env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    for n in (2, 8):
        alike("tp2", f"connections{n}", env={"CUDA_DEVICE_MAX_CONNECTIONS": str(n)})


def test_no_peer():
    none = {"FO_EMU_PEER": "0"}
    for i, sched in enumerate(("lazy", "random:1")):
        alike("tp2", f"peer{i}", sched=sched, env=none)
        alike("up2tp2", f"peers{i}", sched=sched, env=none)
    refused("GPU 1|a graph|peer", "-x", 3, "--tp", 2, "--graph", 1, env=none, left=["main.log"])
    alike("one", "peerone", "--graph", 1, env=none)


def test_memory():
    """What is said not to fit does not, and what is said to fit does."""
    model, mib = "L=4,C=64,NH=4,V=256,maxT=32", 270
    for args, options in ((["-b", 128], {"-r", "-b", "--tp"}), (["-b", 64, "--dp", 2], {"-r", "-b", "--tp", "-z"})):
        how = dict(model=model, env={"FO_EMU_MEMORY": str(mib << 20)})
        args = [*args, "-t", 32, "-r", 0, "-x", 1]
        run = refused("needs|MiB (parameters|gradients|optimizer|activations|would fit: ", *args, **how)
        advice = re.findall(r"(-\w+|--\w+) (\d+) \((\d+) MiB\)", run.err.split("would fit: ")[-1])
        check(advice and {option for option, *_ in advice} <= options, f"advice: {run.err}")
        for option, value, needed in advice:
            changed = list(args)
            if option in changed:
                changed[changed.index(option) + 1] = value
            else:
                changed += [option, value]
            run = succeeds(train(*changed, **how), 90)
            check(f"in all {needed}." in run.out, f"what it takes: {needed}: {run.out[-900:]}")
    refused("MiB|GPU 0", "-x", 1, env={"FO_EMU_MEMORY": str(1 << 20)})


def test_options():
    for option, value in (("--link", "1,5"), ("--pace", 3)):
        refused(f"{option}|DEVICE=cpu", "-x", 1, option, value)
        refused(f"{option}|DEVICE=cpu", "-x", 1, "--tp", 2, option, value)


def test_nccl():
    """A library that is too old, and a program that was built without one."""
    launched = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    if MPI:
        refused("NCCL 2.19.3 is too old, 2.26 or newer is needed", "-x", 1, "--tp", 2, np=2,
                env={"FO_EMU_NCCL_VERSION": "21903"})
        refused("FO_NCCL_CTAS=99: want 1 to 32", "-x", 1, "--tp", 2, np=2, env={"FO_NCCL_CTAS": "99"})
    else:
        refused("2 processes were started|without MPI|MPI=1", "-x", 1, "--tp", 2, env=launched)


# ---- ranks that end ------------------------------------------------------------------------------------------
def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ends(sig, name, graph, limit):
    """One of two processes is killed or frozen: the other says so within limit seconds, and all end."""
    folder = f"ends{sig}{name}{graph}"
    run = mesh(name, "-x", 1000000, "--graph", graph, "--timeout", 2, "-o", folder, np=2)
    run.wait_for(f"step    {STEPS}/")
    ranks, start = run.ranks(), time.time()
    os.kill(ranks[1], sig)
    run.wait(90)
    took = time.time() - start
    check(run.rc not in (0, None) and took < limit, f"{folder}: {took:.1f} s, exit status {run.rc}: {run.err}")
    while time.time() - start < limit and any(alive(pid) for pid in ranks):
        time.sleep(0.1)
    check(not any(alive(pid) for pid in ranks), f"{folder}: every rank has ended")
    return run


def test_ends():
    if not MPI:
        return

    def frozen(name, graph):
        run = ends(signal.SIGSTOP, name, graph, 12)
        said = [line for line in run.err.splitlines() if line.startswith("[rank 0]")]
        check(len(said) == 1, f"one line: {run.err}")
        check(re.search(r": [A-Z]\w*.*: waited 2\.0 s for .*rank 1.*\(step \d+\)", run.err), f"operation, peer, step: {run.err}")

    at_once(lambda: ends(signal.SIGKILL, "tp2", 0, 10), lambda: ends(signal.SIGKILL, "dp2", 1, 10),
            lambda: frozen("tp2", 0), lambda: frozen("dp2", 0), lambda: frozen("tp2", 1))


if DEVICE == "emu":
    main([test_threads, test_processes, test_resume, test_trace, test_no_gpu, test_few_gpus, test_connections,
          test_no_peer, test_memory, test_options, test_nccl, test_ends], make_references)
