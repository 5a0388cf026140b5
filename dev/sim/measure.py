#!/usr/bin/python3
"""measure.py -- writes the text file of the machine at hand for train_gpt --plan: what dev/sim/hardware has of others.

    make -j train_gpt benches && dev/sim/measure.py -o dev/sim/hardware/cpu.txt [--ranks 2] [--rows 2048] [--build DIR]

A rank has cores / RANKS cores, and all ranks compute at once while rates are measured, as they do when they train. GEMM and
attention rates are those of GPT-2 124M's layers, forward and backward, each as often as a step has it; the memory rate is
that of all other operations of such a step together. Links are what rank threads have (bench_link): a network's figures
must be put in by hand, from `mpirun ... bench_link P` on it.
"""
import argparse, datetime, json, os, statistics, subprocess, sys, tempfile

from common import UserError, output_of, write_whole

LAYERS = 12
# how often a step of 124M has an operation; HEAD: the head goes in slices of 1,024 rows
HEAD = None
KERNELS = {"layernorm_forward": 2 * LAYERS + 1, "layernorm_backward": 2 * LAYERS + 1, "gelu_forward": 2 * LAYERS,
           "gelu_backward": LAYERS, "bias_backward": 2 * LAYERS, "encoder_forward": 1, "softmax_stats": HEAD,
           "softmax_loss": HEAD, "zero": 1, "square_sum": 1, "adamw_update": 1}
GEMMS = {f"{layer} {kind}": HEAD if layer == "head" else LAYERS
         for layer in ("qkv", "projection", "fc1", "fc2", "head") for kind in ("forward", "dgrad", "wgrad")}
ATTENTION = {"attention_forward": LAYERS, "attention_backward": LAYERS}


def cores_of(ranks):
    """The cores of each rank, as the lists that taskset takes."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        return [str(cores[r % len(cores)]) for r in range(ranks)]
    each = len(cores) // ranks
    return [",".join(map(str, cores[r * each:(r + 1) * each])) for r in range(ranks)]


def kernels_of(build, ranks, *args):
    """What bench_kernels measures, of as many at a time as there are ranks."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{r}.json" for r in range(ranks)]
        try:
            runs = [subprocess.Popen(["taskset", "-c", cores, f"{build}/dev/bench/bench_kernels", *map(str, args), "--json", f],
                                     stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                    for f, cores in zip(files, cores_of(ranks))]
        except OSError as e:
            raise UserError(f"taskset: {e.strerror}") from None
        said = [run.communicate()[1] for run in runs]
        for run, text in zip(runs, said):
            if run.returncode not in (0, 1) or not all(os.path.getsize(f) for f in files if os.path.exists(f)):
                raise UserError(f"bench_kernels: exit status {run.returncode}: {text.strip()[-200:]}")
        try:
            return [json.load(open(f)) for f in files]
        except (OSError, ValueError):
            raise UserError(f"bench_kernels measured nothing: {said[0].strip()[-200:]}") from None


def rate_of(measured, often, work, rows):
    """Work (flops or bytes) a second of a step's operations together: median of the ranks."""
    rates = []
    for rank in measured:
        results = {r["name"]: r for r in rank["results"]}
        times = {name: rows / 1024 if n is HEAD else n for name, n in often.items()}
        rates.append(sum(times[n] * results[n][work] for n in often) / sum(1e-3 * times[n] * results[n]["ms"] for n in often))
    return statistics.median(rates)


def link_of(command):
    """{key: value} of bench_link's last line."""
    words = output_of(command).strip().split("\n")[-1].split()
    return dict(zip(words[::2], map(float, words[1::2])))


def memory_gib():
    with open("/proc/meminfo") as f:
        return int(f.readline().split()[1]) / (1 << 20)


def processor():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":")[1].strip() for line in f if line.startswith("model name")), os.uname().machine)


def measure(args):
    measured = kernels_of(args.build, args.ranks, "--model", "124M", "--rows", args.rows, "--rounds", args.rounds)
    threads = max(2, args.ranks)
    link = link_of([f"{args.build}/dev/bench/bench_link", threads])
    gemm = rate_of(measured, GEMMS, "flops", args.rows) / 1e12
    cores = max(1, len(os.sched_getaffinity(0)) // args.ranks)
    command = f"dev/sim/measure.py -o {args.output} --ranks {args.ranks} --rows {args.rows} --rounds {args.rounds}"
    return f"""# {processor()}, {args.ranks} rank{"s" * (args.ranks > 1)} of {cores} core{"s" * (cores > 1)} each, links as between rank threads
# (no network: between machines the same). Measured {datetime.date.today()} by {command};
# all ranks computed at once. contention was not measured.
name               {processor()[:40]}, {cores} core{"s" * (cores > 1)} a rank
peak_tflops        {max(gemm, *(r["large_gemm_tflops"] for r in measured)):.4g}
gemm_tflops        {gemm:.4g}
attention_tflops   {rate_of(measured, ATTENTION, "flops", args.rows) / 1e12:.4g}
memory_gbytes_s    {rate_of(measured, KERNELS, "bytes", args.rows) / 1e9:.4g}
memory_gib         {0.9 * memory_gib() / args.ranks:.3g}
kernel_us          {link["kernel_us"]:.3g}
launch_us          {link["launch_us"]:.3g}
node_ranks         {args.ranks}
link_gbytes_s      {link["link_gbytes_s"]:.4g}
link_us            {link["link_us"]:.4g}
node_link_gbytes_s {link["link_gbytes_s"]:.4g}
node_link_us       {link["link_us"]:.4g}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    parser.add_argument("--ranks", type=int, default=2, help="that share the machine's cores (2)")
    parser.add_argument("--rows", type=int, default=2048, help="of the layers that are timed (2048)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--build", default="build/cpu-BF16-mpi", metavar="DIR")
    args = parser.parse_args()
    try:
        if not 1 <= args.ranks <= 16 or args.rows < 1024 or args.rows % 1024 or not 1 <= args.rounds <= 101:
            raise UserError("want --ranks 1 to 16, --rows a multiple of 1024, --rounds 1 to 101")
        write_whole(args.output, measure(args))
    except UserError as e:
        print(f"measure.py: {e}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
