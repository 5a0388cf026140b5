#!/usr/bin/python3
"""check_scaling.py -- predicted against measured: step times of 2, 4 and 8 ranks on a shaped network.

    make -j train_gpt benches && dev/sim/check_scaling.py [--write doc/scaling.md] [--ranks 2,4,8] [--meshes tp,up,dp,mixed]
        [--modes none,slice:4,flash:1] [--steps 5] [--gbit 0.32] [--pace 0.005] [--build DIR]

Each rank is a process on a host of its own (dev/cluster.sh: network namespaces, links of --gbit, Open MPI over TCP).
Where that can't be, as without root, ranks are threads over an emulated link (--link) of that rate, and a line says so.
Matmuls and attention are paced: really computed, then slept until --pace TFLOP/s would be done, so that ranks which
share cores behave like devices of their own. All else takes what it takes on shared cores, and is measured for that,
before each world: a message on this network (bench_link on all hosts; an emulated link has the figures that it is
told), an operation beside its work, bytes of layer norms, AdamW and so on (bench_kernels, one a rank, all at once).
Those are the hardware that --plan is given; nothing is fitted to steps.

Weak scaling: as much work for each rank, whatever their number. Prints medians of steps after the second, their
quartiles, the prediction, and predicted / measured. A row that is off (by more than 15 %) or too noisy (quartiles
further apart than 15 % of the median) is measured up to 3 times; the last time counts. Exit status 1: a row is off;
3: none is, but one is too noisy for a verdict; 2: an error, which a line on stderr names.
"""
import argparse, array, contextlib, datetime, os, random, re, signal, statistics, subprocess, sys, tempfile

from common import CommandFailed, UserError, output_of, plan, range_of, replace_range
from measure import KERNELS, kernels_of, link_of, processor, rate_of

LIMIT, NOISE, TRIES = 0.15, 0.15, 3
SHAPE = {"L": 1, "C": 512, "NH": 8, "V": 512, "maxT": 512}
CLUSTER = "dev/cluster.sh"
NOT_HERE = 77  # its exit status where a machine can't have hosts
LINK_US = 50   # of an emulated link
os.environ.setdefault("FO_CLUSTER", f"scaling{os.getpid()}")


def meshes_of(P, names):
    """[(name, options)]: as many sequences as ranks."""
    T = SHAPE["maxT"]
    all_of_them = {"tp": (f"tp {P}", ["--tp", P, "-b", P]), "up": (f"up {P}", ["--up", P, "-b", P]),
                   "dp": (f"dp {P}", ["--dp", P, "-b", 1, "-z", 1])}
    if P >= 4:
        all_of_them["mixed"] = (f"dp 2 * tp {P // 2}", ["--dp", 2, "--tp", P // 2, "-b", P // 2, "-z", 1])
    return [(name, [*map(str, options), "-t", str(T)]) for key, (name, options) in all_of_them.items() if key in names]


def write_tokens(path, n):
    """A shard of random tokens, as those of a prediction are."""
    draw = random.Random(1)
    header = array.array("i", [20240520, 1, n] + [0] * 253)
    with open(path, "wb") as f:
        f.write(header.tobytes() + array.array("H", [draw.randrange(SHAPE["V"]) for _ in range(n)]).tobytes())


@contextlib.contextmanager
def hosts(P, args):
    """P hosts on a network, while its block runs."""
    try:
        output_of(["bash", CLUSTER, "up", P, "--gbit", args.gbit])
        yield
    except BaseException:  # a signal, too. It is said, not that there may be nothing to remove
        subprocess.run(["bash", CLUSTER, "down"], capture_output=True)
        raise
    output_of(["bash", CLUSTER, "down"])


def why_no_hosts(args):
    """What dev/cluster.sh says where it can't make hosts, or None."""
    try:
        with hosts(args.ranks[0], args):
            return None
    except CommandFailed as e:
        if e.status != NOT_HERE:
            raise
        return e.said


def ranks_of(program, args, *more):
    """The command that runs a program of the build on all ranks."""
    return ([] if args.no_hosts else ["bash", CLUSTER, "run"]) + [f"{args.build}/{program}", *more]


def hardware(path, P, args):
    """Writes this machine's file, as P ranks on the network that is up; returns what a reader wants to see of it."""
    link = link_of(ranks_of("dev/bench/bench_link", args, P))
    if args.no_hosts:
        link.update(link_gbytes_s=args.gbit / 8, link_us=LINK_US)
    kernels = kernels_of(args.build, P, "--model", "124M", "--only", "kernels", "--scale", 16, "--rounds", 5)
    memory = rate_of(kernels, KERNELS, "bytes", 4096) / 1e9
    with open(path, "w") as f:
        f.write(f"name {P} paced ranks\npeak_tflops {args.pace}\ngemm_tflops {args.pace}\nattention_tflops {args.pace}\n"
                f"memory_gbytes_s {memory:.4g}\nmemory_gib 64\nkernel_us {link['kernel_us']}\nlaunch_us {link['launch_us']}\n"
                f"node_ranks 1\nlink_gbytes_s {link['link_gbytes_s']}\nlink_us {link['link_us']}\n"
                f"node_link_gbytes_s {link['link_gbytes_s']}\nnode_link_us {link['link_us']}\n"
                f"link_shared {0 if args.no_hosts else 1}\n")  # each group has an emulated link of its own
    return (f"{P} ranks: a message {link['link_us']:.0f} us and its bytes at {1e3 * link['link_gbytes_s']:.1f} MB/s, "
            f"memory {memory:.2f} GB/s, an operation {link['kernel_us']:.2g} us")


def steps_of(tokens, options, mode, args):
    """Sorted milliseconds of the steps after the second."""
    model = ",".join(f"{k}={v}" for k, v in SHAPE.items())
    link = ["--link", f"{args.gbit / 8:.10g},{LINK_US}"] if args.no_hosts else []
    out = output_of(ranks_of("train_gpt", args, "-i", tokens, "-j", tokens, "-e", model, *options, "-v", 0, "-s", 0,
                             "-x", args.steps + 2, "--overlap", mode, "--pace", args.pace, *link), timeout=300)
    times = [float(ms) for ms in re.findall(r"^step .*?\| ([0-9.]+) ms \|", out, re.M)]
    if len(times) != args.steps + 2:
        raise UserError(f"{' '.join(options)} --overlap {mode}: {len(times)} steps, not {args.steps + 2}")
    return sorted(times[2:])


def row_of(P, name, mode, predicted, measure):
    for _ in range(TRIES):  # others on the machine make steps late
        times = measure()
        median = statistics.median(times)
        low, high = times[len(times) // 4], times[-1 - len(times) // 4]
        noisy = high - low > NOISE * median
        ratio = predicted / median
        if not noisy and abs(ratio - 1) <= LIMIT:
            break
    verdict = "too noisy" if noisy else "ok" if abs(ratio - 1) <= LIMIT else "OFF"
    print(f"{P:5} {name:12} {mode:9} {median:12.1f} {low:9.1f} .. {high:<9.1f} {predicted:12.1f} {ratio:8.3f}  {verdict}",
          flush=True)
    return {"P": P, "mesh": name, "mode": mode, "median": median, "low": low, "high": high, "predicted": predicted,
            "ratio": ratio, "verdict": verdict}


def check(args):
    rows, machines = [], []
    model = ",".join(f"{k}={v}" for k, v in SHAPE.items())
    print(f"# {processor()}, {len(os.sched_getaffinity(0))} cores, {datetime.date.today()}; links of {args.gbit} Gbit/s, "
          f"paced at {args.pace} TFLOP/s; {model}, a sequence of {SHAPE['maxT']} tokens a rank\n"
          f"# step ms: median and quartiles of {args.steps} steps", flush=True)
    args.no_hosts = why_no_hosts(args)
    if args.no_hosts:
        print(f"# no hosts: {args.no_hosts}; ranks are threads over an emulated link", flush=True)
    print(f"{'ranks':>5} {'mesh':12} {'overlap':9} {'measured':>12} {'':9}    {'':9} {'predicted':>12} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        tokens = f"{folder}/tokens.bin"
        write_tokens(tokens, 64 * SHAPE["maxT"])
        for P in args.ranks:
            with contextlib.nullcontext() if args.no_hosts else hosts(P, args):
                machines.append(hardware(f"{folder}/hardware", P, args))
                print(f"# {machines[-1]}", flush=True)
                for name, options in meshes_of(P, args.meshes):
                    predicted = plan(f"{args.build}/train_gpt", f"{folder}/hardware", ["-e", model, *options])
                    for mode in args.modes:
                        if mode not in predicted:
                            raise UserError(f"--modes: {mode} is none of {', '.join(predicted)}")
                        rows.append(row_of(P, name, mode, predicted[mode]["step_ms"],
                                           lambda: steps_of(tokens, options, mode, args)))
    return rows, machines


def markdown(rows, machines, args):
    network = "Ranks are processes on hosts of their own, with links"
    if args.no_hosts:
        network = f"No hosts: {args.no_hosts}. Ranks are threads over an emulated link"
    lines = [f"{datetime.date.today()}, {processor()}, {len(os.sched_getaffinity(0))} cores, `{' '.join(sys.argv)}`.",
             f"{network} of {args.gbit} Gbit/s, matmuls and attention paced at {args.pace} TFLOP/s a rank,",
             f"a sequence of {SHAPE['maxT']} tokens for each rank, medians of {args.steps} steps and quartiles.",
             "Figures of the machine in each world:", "; ".join(machines) + ".", "",
             "| ranks | mesh | overlap | measured, ms | quartiles | predicted, ms | predicted / measured |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for r in rows:
        lines.append(f"| {r['P']} | {r['mesh']} | {r['mode']} | {r['median']:.1f} | {r['low']:.1f} .. {r['high']:.1f} | "
                     f"{r['predicted']:.1f} | {r['ratio']:.3f}{'' if r['verdict'] == 'ok' else ', ' + r['verdict']} |")
    off = [abs(r["ratio"] - 1) for r in rows]
    lines += ["", f"The furthest is {100 * max(off):.1f} % off, the median {100 * statistics.median(off):.1f} %."]
    return "\n".join(lines) + "\n"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="DOCUMENT", help="put the table between its lines `<!-- measured -->`")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--meshes", default="tp,up,dp,mixed")
    parser.add_argument("--modes", default="none,slice:4,flash:1")
    parser.add_argument("--steps", type=int, default=5, help="that are counted, 4 or more (5)")
    parser.add_argument("--gbit", type=float, default=0.32, help="of a rank's link (0.32)")
    parser.add_argument("--pace", type=float, default=0.005, help="TFLOP/s of a rank (0.005)")
    parser.add_argument("--build", default="build/cpu-BF16-mpi", metavar="DIR")
    args = parser.parse_args()
    if not re.fullmatch(r"[248](,[248])*", args.ranks):
        raise UserError(f"--ranks '{args.ranks}': want some of 2,4,8")
    args.ranks, args.meshes, args.modes = [int(P) for P in args.ranks.split(",")], args.meshes.split(","), args.modes.split(",")
    unknown = set(args.meshes) - {"tp", "up", "dp", "mixed"}
    if unknown:
        raise UserError(f"--meshes: '{unknown.pop()}' is none of tp, up, dp, mixed")
    if args.steps < 4:
        raise UserError(f"--steps {args.steps}: want 4 or more; quartiles of fewer are the lowest and the highest")
    if not args.gbit > 0 or not args.pace > 0:
        raise UserError(f"--gbit {args.gbit}, --pace {args.pace}: want numbers above 0")
    return args


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed
    try:
        args = arguments()
        if args.write:
            range_of(args.write, "measured")  # a document without a place for it is refused now, not in 20 minutes
        rows, machines = check(args)
        if args.write:
            replace_range(args.write, "measured", markdown(rows, machines, args))
    except (UserError, subprocess.TimeoutExpired) as e:
        print(f"check_scaling.py: {e}", file=sys.stderr)
        sys.exit(2)
    off = sum(r["verdict"] == "OFF" for r in rows)
    noisy = sum(r["verdict"] == "too noisy" for r in rows)
    print(f"{len(rows)} rows, {off} further than {100 * LIMIT:.0f} % off, {noisy} too noisy for a verdict")
    sys.exit(1 if off else 3 if noisy else 0)


if __name__ == "__main__":
    main()
