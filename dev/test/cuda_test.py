#!/usr/bin/python3
"""The program on the cuda device. Which tests, the build's folder B says: of build/emu-* all that can be seen without a
GPU (dev/emu/README.md): the same files from every schedule of the emulated device, mode, transport and graph setting,
ranks that end, and each line about a bad machine; of build/cuda-* what the real program says where there is no GPU, or
where those that are there are hidden from it. ONLY=trace runs test_trace alone.
"""

import glob, os, re, shutil, signal, subprocess, sys, time

from program import (DEVICE, MPI, Run, at_once, check, losses, main, refused, reported, same, steps, succeeds, tmp,
                     train, write)
from trace_test import Timeline, same_bytes

SCHEDULES = ["eager", "lazy", "random:1", "random:2", "random:3"]
OVERLAPS = ["none", "slice:2", "flash", "flash:2"]
# two micro-steps a step, so four steps launch every graph again after it was made
STEPS = 4
# heads of 8 numbers go through the tensor cores' kernels, which take long here; heads of 2 through the plain ones
WIDE, NARROW = "L=2,C=32,NH=4,V=256,maxT=32", "L=2,C=8,NH=4,V=256,maxT=32"
# model, B, T, options: whole sequences a rank, or cut in zig-zag where B is 1
MESHES = {"one": (WIDE, 2, 16), "tp2": (WIDE, 1, 16, "--tp", 2), "tp4": (NARROW, 4, 8, "--tp", 4),
          "ring4": (NARROW, 1, 16, "--tp", 4, "--sp", 0, "--topology", "ring"),
          "up2": (NARROW, 2, 16, "--up", 2, "-z", 1), "dp2": (WIDE, 1, 16, "--dp", 2, "-z", 1),
          "up2tp2": (NARROW, 1, 16, "--up", 2, "--tp", 2, "-r", 3),
          "dp2tp2": (NARROW, 2, 8, "--dp", 2, "--tp", 2, "-z", 2)}


def mesh(name, *args, sched="eager", env=None, **how):
    """A run of one of MESHES, of STEPS steps unless args say so."""
    model, b, t, *own = MESHES[name]
    dp = own[own.index("--dp") + 1] if "--dp" in own else 1
    own += [] if "-x" in args else ["-x", STEPS]
    return train(*own, "-l", "1e-3", "-b", b, "-t", t, "-d", 2 * dp * b * t, *args, model=model,
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
    at_once(*(lambda n=n: succeeds(mesh(n, "--overlap", "none", "-o", f"{n}ref"), 90) for n in MESHES))
    for name in MESHES:
        check(steps(f"{name}ref") == [STEPS] and len(set(losses(f"{name}ref"))) == STEPS, f"{name} trains")


def test_threads():
    """Neither the mode nor a graph nor the order in which the device does what it may do in any changes a bit."""
    jobs = []
    for i, name in enumerate(MESHES):
        for k, sched in enumerate(SCHEDULES):
            for graph in (0, 1) if name == "tp2" else ((i + k) % 2,):
                jobs.append((name, sched, graph, OVERLAPS[(i + k + graph) % 4] if name != "one" else "flash"))
    at_once(*(lambda n=n, s=s, g=g, o=o: alike(n, f"{n}{g}{s}", "--graph", g, "--overlap", o, sched=s)
              for n, s, g, o in jobs))


def test_processes():
    """Two processes, whose messages NCCL carries, write what two threads do."""
    if not MPI:
        return
    jobs = [(name, (i + k) % 2, sched) for i, name in enumerate(("tp2", "dp2")) for k, sched in enumerate(SCHEDULES)]
    jobs += [("dp2", 1, "eager"), ("up2", 0, "lazy"), ("up2", 1, "random:1")]

    def one(name, graph, sched):
        overlap = OVERLAPS[(SCHEDULES.index(sched) + graph) % 4]
        run = alike(name, f"{name}np{graph}{sched}", "--graph", graph, "--overlap", overlap, sched=sched, np=2)
        check("as processes" in run.out and run.out.count(f"step    1/{STEPS} ") == 1, f"one speaks: {run.out[-300:]}")

    at_once(*(lambda j=j: one(*j) for j in jobs))


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
        same_bytes(runs[kind][0], run, kind)

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
        for args in (["--help"], ["-e", WIDE, "-t", 16, "--tp", 2, "--dry-run"]):
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
    refused("no peer access|graph|--graph 0", "-x", 3, "--tp", 2, "--graph", 1, env=none, left=["main.log"])
    alike("one", "peerone", "--graph", 1, env=none)


def test_memory():
    """What is said not to fit does not, and what is said to fit does."""
    model, mib = "L=4,C=64,NH=4,V=256,maxT=32", 401  # of which it leaves much to libraries
    alone = {"-r", "-b", "--up", "--tp"}
    for args, options in ((["-b", 16], alone), (["-b", 16, "--dp", 2], alone | {"-z", "--dp"})):
        how = dict(model=model, env={"FO_EMU_MEMORY": str(mib << 20)})
        args = [*args, "-t", 32, "-r", 0, "-x", 1]
        run = refused("needs|MiB (parameters|gradients|optimizer|activations|would fit: ", *args, **how)
        advice = re.findall(r"((?:--?\w+ \d+ )+)\((\d+) MiB", run.err.split("would fit: ")[-1])
        check(len(advice) > 1, f"advice: {run.err}")
        for changes, needed in advice:
            changed = list(args)
            for option, value in re.findall(r"(--?\w+) (\d+)", changes):
                check(option in options, f"{option} helps: {run.err}")
                if option in changed:
                    changed[changed.index(option) + 1] = value
                else:
                    changed += [option, value]
            run = succeeds(train(*changed, **how), 90)
            check(f"in all {needed}." in run.out, f"what it takes: {needed}: {run.out[-900:]}")
    both_ways("its device has 0 MiB for it", env={"FO_EMU_MEMORY": str(1 << 20)})


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

    def frozen(name, graph):  # mpirun does not see it
        run = ends(signal.SIGSTOP, name, graph, 12)
        said = [line for line in run.err.splitlines() if line.startswith("[rank 0]")]
        check(len(said) == 1, f"one line: {run.err}")
        told = re.search(r" (\w+): waited 2\.0 s for (rank 1 to|the other ranks).*\(step \d+\)$", said[0])
        check(told and (graph or told[1] != "graph"), f"operation, peer and step: {said[0]}")

    at_once(lambda: ends(signal.SIGKILL, "tp2", 0, 10), lambda: ends(signal.SIGKILL, "dp2", 1, 10),
            lambda: frozen("tp2", 0), lambda: frozen("dp2", 0), lambda: frozen("tp2", 1))


# ---- the real program ----------------------------------------------------------------------------------------
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def test_bare():
    """It starts without a driver, and all but training works."""
    refused("no NVIDIA GPU here|DEVICE=cpu", "-x", 1, env=HIDDEN)
    refused("no NVIDIA GPU here|DEVICE=cpu", "-x", 1, "--tp", 2, "--graph", 1, env=HIDDEN)
    refused("CUDA_DEVICE_MAX_CONNECTIONS=1|unset", "-x", 1, env={**HIDDEN, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    refused("--pace|DEVICE=cpu", "-x", 1, "--pace", 1, env=HIDDEN)
    refused("unknown option|-xq", "-xq", 1, env=HIDDEN)
    for args in (["--help"], ["-e", "d12", "--tp", 2, "--dry-run"]):
        run = Run(*args, env=HIDDEN).wait()
        check(run.rc == 0 and run.err == "" and len(run.out) > 500, f"{args}: {run.rc} {run.err}")


def test_bare_processes():
    """A missing, an old and a partial NCCL are found before the GPU; mpirun starts no build without MPI."""
    if not MPI:
        refused("2 processes were started|without MPI|MPI=1", "-x", 1, "--tp", 2,
                env={**HIDDEN, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
        return
    refused("no NVIDIA GPU here|DEVICE=cpu", "-x", 1, "--tp", 2, np=2, env=HIDDEN)
    with open("flashoverlap/cuda/comm_nccl.cu") as f:
        names = re.findall(r"X\(([A-Z]\w+)\)", f.read())
    version = "int ncclGetVersion(int* v) { *v = 21903; return 0; }\n"
    others = "".join(f"int nccl{name}(void) {{ return 0; }}\n" for name in names if name != "GetVersion")
    check(len(names) > 10, f"functions of NCCL: {names}")
    for kind, source, says in (("none", None, "need NCCL 2.26 or newer"), ("part", version, "this one has no nccl"),
                               ("old", version + others, "NCCL 2.19.3 is too old, 2.26 or newer")):
        os.mkdir(f"{tmp}/{kind}")
        library = write(f"{kind}/libnccl.so.2")  # no library, so it can't be loaded
        if source:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", f"{tmp}/{library}", write(f"{kind}.c", source.encode())],
                           cwd=tmp, check=True)
        refused(says, "-x", 1, "--tp", 2, np=2, env={**HIDDEN, "LD_LIBRARY_PATH": f"{tmp}/{kind}"})


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** gpu) { *gpu = (void*)bus; return bus[5] != '0'; }
int nvmlDeviceGetClockInfo(void* gpu, int domain, unsigned* mhz) { *mhz = domain == 1 ? 1980 : 2619; return 0; }
int nvmlDeviceGetPowerUsage(void* gpu, unsigned* milliwatts) { *milliwatts = 350123; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void* gpu, unsigned* milliwatts) { *milliwatts = 700000; return 0; }
int nvmlDeviceGetTemperature(void* gpu, int sensor, unsigned* celsius) { *celsius = sensor ? 99 : 45; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void* gpu, unsigned long long* reasons) { *reasons = 0x24; return 0; }
"""


def test_nvml():
    """-lg asks a library that may be missing, old, or there; --profile has rows with graphs, too."""
    for kind, source, says in (("nvnone", None, "clocks and power are not known: "),
                               ("nvpart", NVML[:300], "are not known: nvmlDeviceGetPowerUsage"),
                               ("nvwhole", NVML, "GPU 0: SMs 1980 MHz, memory 2619 MHz, 350 of 700 W, 45 C, "
                                                 "slowed down by power cap, heat\n")):
        os.mkdir(f"{tmp}/{kind}")
        if source:
            source = source[:source.rindex("}") + 1]  # whole functions
            subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", f"{tmp}/{kind}/libnvidia-ml.so.1",
                            write(f"{kind}.c", source.encode())], cwd=tmp, check=True)
        run = succeeds(mesh("tp2", "-lg", STEPS, "--profile", f"{STEPS}-{STEPS}", "--graph", 1,
                            env={"LD_LIBRARY_PATH": f"{tmp}/{kind}"}), 90)
        check(says in run.out and run.out.count("GPU 0: ") == 1, f"{kind}: '{says}': {run.out[-900:]}")
        rows = re.search(r"profile of rank 0(.*\n)+?.*F1 matmul_forward(.*\n)+?exchanges of tp", run.out)
        check(rows, f"--profile: {run.out[-900:]}")


if DEVICE == "cpu":
    sys.exit("cuda_test.py: B is the folder of a build of DEVICE=emu or DEVICE=cuda")
if DEVICE == "cuda":
    main([test_bare, test_bare_processes])
main([test_threads, test_processes, test_resume, test_trace, test_no_gpu, test_few_gpus, test_connections,
      test_no_peer, test_memory, test_options, test_nccl, test_nvml, test_ends], make_references)
