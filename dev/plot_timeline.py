#!/usr/bin/python3
"""plot_timeline.py -- draws timelines of --trace (real or simulated, none, slice and flash) under each other.

    dev/plot_timeline.py none.json slice.json flash.json -o step.png [--rank 0] [--step N] [--around F4] [--ms 20]

Each file is a pair of rows on one scale of time, which begins with the step: what the compute stream did, and what was on
the links (one row for each group that has any). Where the compute stream stood waiting for a receive is red: the tail, if
it is the end of a collective. Beside each pair: the step's time, and the exposed part. --around shows the first place
where that operation ran, --ms so many milliseconds. The ending of the output's name says what it is: .png, .svg, .pdf.
"""
import argparse
import json
import os
import re
import sys

COLORS = {"F": "#4c78a8", "H": "#54a24b", "B": "#7d6bb0", "U": "#c28f2c", "D": "#8c8c8c", "E": "#9d755d"}
PLAIN = "#b8c4d6"  # no operation of the table: layer norms, optimizer ...
EXPOSED = "#d62728"


class UserError(Exception):
    pass


def color_of(label):
    return COLORS.get(label[:1], PLAIN) if re.match(r"[FHBUDE]\d", label) else PLAIN


def read(path, rank, step):
    """(time of the step in ms, {row: [(start, length in ms, label, category)]}), times from the step's beginning on."""
    try:
        with open(path) as f:
            events = json.load(f)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is no timeline of --trace: {e}") from None
    spans = [e for e in events if e.get("ph") == "X" and e["pid"] == rank]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    steps = [e for e in spans if e["cat"] == "step"]
    if not steps:
        ranks = sorted({e["pid"] for e in events})
        raise UserError(f"{path}: no step of rank {rank}; it has ranks {ranks}")
    chosen = [e for e in steps if step is None or e["name"] == f"step {step}"]
    if not chosen:
        raise UserError(f"{path}: no step {step}; it has {', '.join(e['name'] for e in steps)}")
    start, length = chosen[0]["ts"], chosen[0]["dur"]
    found = {}
    for e in spans:
        if e["cat"] == "step" or e["ts"] + e["dur"] < start or e["ts"] > start + length:
            continue
        label = e["name"].replace("exposed ", "").split(" ")[0]
        found.setdefault(rows[e["tid"]], []).append(((e["ts"] - start) / 1e3, e["dur"] / 1e3, label, e["cat"]))
    return length / 1e3, found


def window_of(rows, around, ms, length):
    """(from, to) in ms: the whole step, or where `around` first ran and a little before."""
    first = 0.0
    if around:
        starts = [s[0] for spans in rows.values() for s in spans if s[2] == around]
        if not starts:
            names = sorted({s[2] for spans in rows.values() for s in spans if color_of(s[2]) != PLAIN})
            raise UserError(f"--around {around}: no such operation in the step; it has {', '.join(names)}")
        first = min(starts)
    return first - 0.05 * ms if ms else first, first + ms if ms else length


def draw_row(axis, y, spans, start, end, origin):
    for category in ("comm", "compute", "exposed"):  # one collection a kind: a step has tens of thousands of spans
        chosen = [s for s in spans if s[3] == category and s[0] + s[1] > start and s[0] < end]
        if chosen:
            colors = [EXPOSED if category == "exposed" else color_of(s[2]) for s in chosen]
            axis.broken_barh([(s[0] - origin, s[1]) for s in chosen], (y, 0.8), facecolors=colors, linewidth=0.3,
                             edgecolor="white", alpha=0.6 if category == "comm" else 1.0)
        runs = []  # chunks of an operation have one name together, where there is room for it
        for s in chosen:
            if runs and runs[-1][2] == s[2] and category != "exposed":
                runs[-1][1] = s[0] + s[1]
            else:
                runs.append([s[0], s[0] + s[1], s[2]])
        for first, last, label in runs:
            first, last = max(first, start), min(last, end)
            if last - first > 0.02 * (end - start):
                axis.text((first + last) / 2 - origin, y + 0.4, "tail" if category == "exposed" else label.split("_")[-1],
                          ha="center", va="center", fontsize=6, color="black" if category == "comm" else "white")


def draw(args):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots = [(path, *read(path, args.rank, args.step)) for path in args.files]
    heights = [1 + sum(name.startswith("comm") for name in rows) for _, _, rows in plots]
    figure, axes = plt.subplots(len(plots), 1, figsize=(11, 0.5 + 0.55 * sum(heights) + 0.45 * len(plots)), squeeze=False,
                                gridspec_kw={"height_ratios": heights}, sharex=True)
    for axis, (path, length, rows) in zip(axes[:, 0], plots):
        names = ["compute"] + sorted(name for name in rows if name.startswith("comm"))
        start, end = window_of(rows, args.around, args.ms, length)
        origin = start if args.around else 0.0
        for y, name in enumerate(reversed(names)):
            draw_row(axis, y, rows.get(name, []), start, end, origin)
        exposed = sum(s[1] for s in rows.get("compute", []) if s[3] == "exposed")
        axis.set_yticks([y + 0.4 for y in range(len(names))], list(reversed(names)), fontsize=7)
        axis.set_title(f"{os.path.splitext(os.path.basename(path))[0]}: step {length:.2f} ms, exposed {exposed:.2f} ms",
                       fontsize=8, loc="left")
        axis.set_ylim(0, len(names))
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    longest = max(length for _, length, _ in plots)
    axes[-1, 0].set_xlim(0, 1.05 * args.ms if args.ms else longest)
    axes[-1, 0].set_xlabel("ms" + (f" from the first {args.around} on" if args.around else " of the step") +
                           "; red: the compute stream waits for a receive", fontsize=7)
    axes[-1, 0].tick_params(axis="x", labelsize=7)
    figure.tight_layout()
    kind = os.path.splitext(args.output)[1][1:]
    temporary = f"{args.output}.tmp"
    try:
        figure.savefig(temporary, dpi=150, format=kind)
        os.replace(temporary, args.output)
    except (ValueError, OSError) as e:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise UserError(f"{args.output}: {e}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="what --trace wrote")
    parser.add_argument("-o", "--output", required=True, help="the picture: .png, .svg or .pdf")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, help="its number; without it the first of the file")
    parser.add_argument("--around", metavar="OPERATION", help="from the first place on where it ran: F4")
    parser.add_argument("--ms", type=float, help="so many milliseconds of the step")
    args = parser.parse_args()
    try:
        if args.ms is not None and not args.ms > 0:
            raise UserError(f"--ms {args.ms}: want more than 0")
        draw(args)
    except ImportError:
        print("plot_timeline.py: needs the package matplotlib: apt install python3-matplotlib", file=sys.stderr)
        sys.exit(1)
    except UserError as e:
        print(f"plot_timeline.py: {e}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
