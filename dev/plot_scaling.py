#!/usr/bin/python3
"""plot_scaling.py -- weak and strong scaling to 1,024 ranks, as train_gpt --plan predicts it: pictures and tables.

    make -j train_gpt && dev/plot_scaling.py [-o doc] [--write doc/scaling.md] [--only NAME] [--ranks 1024] [--build DIR]

For each study (weak_h100, strong_h100, weak_4090) a grid of plots is written, scaling_NAME.png: a row for each model, a
column for each way to share the work (tp, up, dp alone), MFU against ranks under none, slice:4 and flash:1. --write puts the
tables between the lines `<!-- predicted -->` and `<!-- end of predicted -->` of a document. Points whose ranks would need
more memory than the machine has are left out. Nothing is measured here: see dev/sim/check_scaling.py.
"""
import argparse, concurrent.futures, os, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "sim"))
from common import UserError, plan, replace_range

MODES = {"none": "#8c8c8c", "slice:4": "#c28f2c", "flash:1": "#d62728"}
# sequences of a rank that go through at a time, their tokens, -r, and the tokens of a step in all: strong scaling
MODELS = {"124M": {"e": "d12", "B": 8, "T": 1024, "r": 1, "tokens": 1 << 19},
          "1.5B": {"e": "d48", "B": 4, "T": 1024, "r": 1, "tokens": 1 << 20},
          "7B": {"e": "L=32,C=4096,NH=32,V=50304,maxT=2048", "B": 2, "T": 2048, "r": 2, "tokens": 1 << 22},
          "70B": {"e": "L=80,C=8192,NH=64,V=50304,maxT=4096", "B": 1, "T": 4096, "r": 3, "tokens": 1 << 22}}
WEAK_TOKENS = 16384  # of a rank and step
SHARED = {"tp": 8, "up": 8, "dp": 1}  # ranks of a tp or up group: a machine; the others are dp
STUDIES = {"weak_h100": ("h100", "weak", ("124M", "1.5B", "7B", "70B")),
           "strong_h100": ("h100", "strong", ("124M", "1.5B", "7B", "70B")),
           "weak_4090": ("4090", "weak", ("124M", "1.5B"))}
MACHINES = {"h100": "8 H100 a machine, NVLink within, 45 GB/s a rank between", "4090":
            "8 RTX 4090 a machine, PCIe without peer access, 1.4 GB/s a rank between"}


def options_of(model, way, kind, P):
    """Of P ranks, or None: the batch can't be cut so far."""
    group = min(P, SHARED[way])
    dp, T = P // group, model["T"]
    tokens = WEAK_TOKENS * P if kind == "weak" else model["tokens"]
    B = model["B"] * group
    while B > 0 and tokens % (B * T * dp):
        B -= 1
    if B == 0:
        return None
    share = [f"--{way}", group] if way != "dp" else []
    return [str(o) for o in ["-e", model["e"], "-t", T, "-b", B, "-d", tokens, "-r", model["r"], "--dp", dp, *share,
                             *(["-z", 1] if P > SHARED[way] or way != "tp" and P > 1 else [])]]


def points_of(args):
    """{(study, model, way, ranks): modes as common.plan has them}."""
    jobs = {}
    for study in args.only or STUDIES:
        hardware, kind, models = STUDIES[study]
        for name in models:
            for way in SHARED:
                P = 1
                while P <= args.ranks:
                    options = options_of(MODELS[name], way, kind, P)
                    if options:
                        jobs[study, name, way, P] = (hardware, options)
                    P *= 2
    points = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {key: pool.submit(plan, args.program, hardware, options) for key, (hardware, options) in jobs.items()}
        for n, (key, run) in enumerate(runs.items(), 1):
            points[key] = {mode: p for mode, p in run.result().items() if mode in MODES and "gib" not in p}
            if n % 25 == 0 or n == len(runs):
                print(f"{n} of {len(runs)} meshes", file=sys.stderr, flush=True)
    return points


def assumption(study):
    hardware, kind, _ = STUDIES[study]
    batch = (f"Weak scaling: {WEAK_TOKENS:,} tokens for each rank and step" if kind == "weak" else
             "Strong scaling: the tokens of a step stay, as each row says")
    return (f"Predicted, not measured: preset {hardware} ({MACHINES[hardware]}). {batch}.\n"
            f"tp and up: groups of 8 ranks, one machine, the rest dp; dp: replicas alone. ZeRO 1, bf16, direct topology. Points "
            f"that do not fit the memory are left out. Where slice:4 (dashed) and flash:1 are as fast, both are drawn.")


def draw(study, points, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, kind, models = STUDIES[study]
    figure, axes = plt.subplots(len(models), len(SHARED), figsize=(11, 2.5 * len(models) + 0.9), squeeze=False, sharex=True,
                                sharey="row")
    for i, name in enumerate(models):
        model = MODELS[name]
        step = f", {model['tokens'] / (1 << 20):g} Mi tokens a step" if kind == "strong" else ""
        for k, way in enumerate(SHARED):
            axis = axes[i, k]
            for mode, color in MODES.items():
                line = sorted((P, p[mode]["mfu"]) for (s, n, w, P), p in points.items()
                              if (s, n, w) == (study, name, way) and mode in p)
                axis.plot(*(zip(*line) if line else ((), ())), color=color, marker="o", markersize=3, label=mode,
                          linestyle="--" if mode == "slice:4" else "-", zorder=3 if mode == "slice:4" else 2)
            if not axis.lines or not any(len(l.get_xdata()) for l in axis.lines):
                axis.text(0.5, 0.5, "does not fit", ha="center", transform=axis.transAxes, fontsize=8)
            axis.set_xscale("log", base=2)
            axis.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
            axis.set_xlim(0.8, 1300)
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=7)
            shared = f"{way} 8, dp" if way != "dp" else "dp"
            axis.set_title(f"{name}, {shared}; {model['B']} x {model['T']} a rank at a time, -r {model['r']}{step}", fontsize=6.5,
                           loc="left")
        axes[i, 0].set_ylabel("MFU, %", fontsize=8)
        axes[i, 0].set_ylim(bottom=0)  # shared by the row; earlier it would keep what was not drawn yet from being seen
    for axis in axes[-1]:
        axis.set_xlabel("ranks", fontsize=8)
    axes[0, 0].legend(fontsize=7)
    figure.text(0.01, 0.005, assumption(study), fontsize=7, va="bottom")
    figure.tight_layout(rect=(0, 0.45 / (2.5 * len(models) + 0.9), 1, 1))
    temporary = f"{path}.tmp"
    try:
        figure.savefig(temporary, dpi=110, format="png")
        os.replace(temporary, path)
    except OSError as e:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise UserError(f"{path}: {e.strerror}") from None
    plt.close(figure)


def cell(p):
    return " / ".join(f"{p[mode]['mfu']:.1f}" if mode in p else "-" for mode in MODES) if p else "-"


def tables(points, ranks):
    """MFU under none / slice:4 / flash:1 at some numbers of ranks, and where flash gains nothing."""
    columns = [P for P in (1, 8, 64, 256, 1024) if P <= ranks]
    lines = []
    for study in dict.fromkeys(key[0] for key in points):
        hardware, kind, models = STUDIES[study]
        lines += ["", f"**{kind.capitalize()} scaling, preset {hardware}** ([picture](scaling_{study}.png)), MFU in % under "
                  f"{' / '.join(MODES)}:", "", f"| model | shared by | {' | '.join(f'P = {P}' for P in columns)} |",
                  "| --- | --- |" + " --- |" * len(columns)]
        for name in models:
            for way in SHARED:
                cells = [cell(points.get((study, name, way, P))) for P in columns]
                if any(c.strip(" -/") for c in cells):
                    lines.append(f"| {name} | {way} | {' | '.join(cells)} |")
    worse = []
    for (study, name, way, P), p in points.items():
        if P > 1 and all(mode in p for mode in MODES):
            best = min(p["none"]["step_ms"], p["slice:4"]["step_ms"])
            worse.append((100 * (p["flash:1"]["step_ms"] / best - 1), study, name, way, P))
    slower = sorted((w for w in worse if w[0] > 0.5), reverse=True)
    lines += ["", f"Of {len(worse)} meshes, flash:1 is slower than the better of none and slice:4 by more than 0.5 % at "
              f"{len(slower)}" + (":" if slower else "."), ""]
    for percent, study, name, way, P in slower[:8]:
        lines.append(f"- {percent:.1f} %: {study}, {name}, {way}, {P} ranks")
    return "\n".join(lines[1:]).rstrip("\n") + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="doc", metavar="DIR", help="of the pictures (doc)")
    parser.add_argument("--write", metavar="DOCUMENT", help="put the tables there")
    parser.add_argument("--only", action="append", choices=list(STUDIES), help="one study; may be there again")
    parser.add_argument("--ranks", type=int, default=1024, help="the most (1024)")
    parser.add_argument("--build", default="build/cpu-BF16-mpi", metavar="DIR")
    args = parser.parse_args()
    args.program = f"{args.build}/train_gpt"
    try:
        import matplotlib  # now, not after minutes  # noqa: F401
        if not 1 <= args.ranks <= 1024:
            raise UserError(f"--ranks {args.ranks}: want 1 to 1024")
        if not os.path.isdir(args.output):
            raise UserError(f"-o {args.output}: there is no such folder")
        points = points_of(args)
        for study in args.only or STUDIES:
            draw(study, points, f"{args.output}/scaling_{study}.png")
        if args.write:
            replace_range(args.write, "predicted", tables(points, args.ranks))
        else:
            print(tables(points, args.ranks), end="")
    except ImportError:
        print("plot_scaling.py: needs the package matplotlib: apt install python3-matplotlib", file=sys.stderr)
        sys.exit(1)
    except UserError as e:
        print(f"plot_scaling.py: {e}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
