#!/usr/bin/python3
"""plot_timeline.py -- draws timelines of --trace (real or simulated, none, slice and flash) under each other.

    dev/plot_timeline.py none.json slice.json flash.json -o step.png [--rank 0] [--step N] [--around F4] [--ms 20]

Each file is a pair of rows on one scale of time: what the compute stream did, and what was on the links (one row for each
group that has any). Where the compute stream stood waiting for a receive is red, with the milliseconds over it; it is a
"tail" behind what its operation computes. The picture has the whole step; --around shows it from the first place on
where that operation ran, with a dashed line where it runs the next time; --ms so many milliseconds. The ending of the
output's name says what it is: .png, .svg, .pdf.
"""
import argparse
import json
import math
import os
import re
import sys

# of an operation's number 1, 2, 3, ... by its letter
COLORS = {
    "F": ("#34689e", "#1f8a84", "#6a5aa8", "#7b8c2f"),
    "B": ("#7b8c2f", "#9d755d", "#6a5aa8", "#1f8a84", "#5f6f86", "#34689e"),
    "U": ("#c28f2c", "#9d755d"), "H": ("#4f9a45",), "D": ("#8c8c8c",), "E": ("#9d755d",),
}
PLAIN = "#b8c4d6"  # no operation of the table: layer norms, optimizer ...
EXPOSED = "#d62728"
FONT = 9
WHAT = {
    "F1": "gather, QKV", "F2": "attention, projection, reduce-scatter", "F3": "gather, fc1", "F4": "fc2, reduce-scatter",
    "B1": "gather, fc2 dgrad", "B3": "fc1 dgrad, reduce-scatter", "B4": "gather, projection dgrad, attention",
    "B6": "QKV dgrad, reduce-scatter",
}
# what is read of an event, and of one that takes time
FIELDS = {"name": str, "ph": str, "pid": int, "tid": int}
SPAN_FIELDS = {"cat": str, "ts": (int, float), "dur": (int, float)}


class UserError(Exception):
    pass


def color_of(label):
    if not re.match(r"[FHBUDE]\d", label):
        return PLAIN
    shades = COLORS[label[0]]
    return shades[(int(label[1]) - 1) % len(shades)]


def events_of(path):
    try:
        with open(path) as f:
            events = list(json.load(f)["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is no timeline of --trace: {e}") from None
    for number, e in enumerate(events):
        fields = e if isinstance(e, dict) else {}
        wanted = {**FIELDS, **(SPAN_FIELDS if fields.get("ph") == "X" else {})}
        if fields.get("name") == "thread_name":
            wanted["args"] = dict
        lacking = [key for key, kind in wanted.items() if not isinstance(fields.get(key), kind)]
        if lacking:
            raise UserError(f"{path} is no timeline of --trace: event {number} has no valid '{lacking[0]}': "
                            f"{json.dumps(e)[:80]}")
    return events


def read(path, rank, step):
    """(time of the step in ms, {row: [(start, length in ms, label, category)]}), times from the step's beginning on."""
    events = events_of(path)
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
    rows = {e["tid"]: e["args"].get("name") for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    nameless = {e["tid"] for e in spans if not isinstance(rows.get(e["tid"]), str)}
    if nameless:
        raise UserError(f"{path} is no timeline of --trace: row {min(nameless)} of rank {rank} has no name")
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
    """(from, to) in ms: the whole step, or from where `around` first ran."""
    first = 0.0
    if around:
        starts = [s[0] for spans in rows.values() for s in spans if s[2] == around]
        if not starts:
            names = sorted({s[2] for spans in rows.values() for s in spans if color_of(s[2]) != PLAIN})
            raise UserError(f"--around {around}: no such operation in the step; it has {', '.join(names)}")
        first = min(starts)
    return first, first + ms if ms else length


def runs_of(spans):
    """Spans of one name that follow each other, together: [from, to, label, category]."""
    runs = []
    for start, length, label, category in sorted(spans):
        if runs and runs[-1][2:] == [label, category] and (category != "exposed" or start < runs[-1][1] + 0.1):
            runs[-1][1] = start + length
        elif length > 0.05 or category == "exposed":  # copies and layer norms have no names here
            runs.append([start, start + length, label, category])
    return runs


def draw_row(axis, y, spans, start, end):
    length = end - start
    shown = [s for s in spans if s[0] + s[1] > start and s[0] < end]
    for category in ("comm", "compute", "exposed"):  # one collection a kind: a step has tens of thousands of spans
        chosen = [s for s in shown if s[3] == category]
        if chosen:
            colors = [EXPOSED if category == "exposed" else color_of(s[2]) for s in chosen]
            edges = [0.4 if s[1] > 0.002 * length else 0.0 for s in chosen]
            axis.broken_barh([(s[0] - start, s[1]) for s in chosen], (y, 0.8), facecolors=colors, linewidth=edges,
                             edgecolor="white", alpha=0.55 if category == "comm" else 1.0)
    computed = None
    for first, last, label, category in runs_of(shown):
        name = label.split("_")[-1]
        if category == "exposed":  # before or after what its operation computes
            name = "tail" if label == computed else "waits"
        elif category == "compute":
            computed = label
        first, last = max(first, start), min(last, end)
        if last - first > (0.02 + 0.006 * len(name)) * length:  # there is room for it
            comm = category == "comm"
            ground = None if comm else dict(facecolor=EXPOSED if name in ("tail", "waits") else color_of(label),
                                            edgecolor="none", pad=1)
            axis.text((first + last) / 2 - start, y + 0.38, name, ha="center", va="center", fontsize=FONT,
                      color="black" if comm else "white", bbox=ground)
    named = -math.inf
    for first, last in waits_of(shown):
        middle = (max(first, start) + min(last, end)) / 2 - start
        middle = min(max(middle, 0.025 * length), 0.975 * length)
        if last - first > 0.005 * length and middle > named + 0.05 * length:
            named = middle
            axis.text(middle, y + 0.84, f"{last - first:.1f} ms", ha="center", va="bottom", fontsize=FONT, color=EXPOSED)


def waits_of(spans):
    """[(from, to)] of exposed time, of operations that follow each other together."""
    waits = []
    for start, length, _, category in sorted(spans):
        if category == "exposed" and waits and start < waits[-1][1] + 0.1:
            waits[-1][1] = start + length
        elif category == "exposed":
            waits.append([start, start + length])
    return waits


def next_time(rows, around):
    """When `around` runs again after other operations, but for F1 and F2 after more than each other, or None."""
    runs = [run for run in runs_of(rows.get("compute", [])) if color_of(run[2]) != PLAIN]
    first = min((run[0] for run in runs if run[2] == around), default=math.inf)  # it may be on the links alone
    others = set()
    for start, _, label, _ in runs:
        if label != around:
            others.add(label)
        elif start > first and others and others | {label} != {"F1", "F2"}:
            return start
        else:
            others.clear()
    return None


def legend(figure, plots, windows):
    from matplotlib.patches import Patch

    seen = {s[2] for (_, _, rows), (start, end) in zip(plots, windows) for spans in rows.values() for s in spans
            if start <= s[0] < end}
    entries = [Patch(color=color_of(name), label=f"{name}: {WHAT[name]}") for name in sorted(seen & set(WHAT))]
    entries.append(Patch(color=EXPOSED, label="the compute stream waits for a receive"))
    figure.legend(handles=entries, loc="lower center", ncol=min(len(entries), 3), fontsize=FONT, frameon=False)
    return -(-len(entries) // 3)


def draw(args):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots = [(path, *read(path, args.rank, args.step)) for path in args.files]
    windows = [window_of(rows, args.around, args.ms, length) for _, length, rows in plots]
    heights = [1 + sum(name.startswith("comm") for name in rows) for _, _, rows in plots]
    figure, axes = plt.subplots(len(plots), 1, figsize=(9, 0.9 + 0.36 * sum(heights) + 0.5 * len(plots)), squeeze=False,
                                gridspec_kw={"height_ratios": heights}, sharex=True)
    for axis, (path, length, rows), (start, end) in zip(axes[:, 0], plots, windows):
        names = ["compute"] + sorted(name for name in rows if name.startswith("comm"))
        for y, name in enumerate(reversed(names)):
            draw_row(axis, y, rows.get(name, []), start, end)
        again = next_time(rows, args.around) if args.around else None
        if again is not None and again < end:
            axis.plot([again - start] * 2, [0, len(names) - 0.15], color="black", linestyle="--", linewidth=1)
            axis.set_title(f"{args.around} again after {again - start:.1f} ms", fontsize=FONT, loc="right")
        exposed = sum(s[1] for s in rows.get("compute", []) if s[3] == "exposed")
        axis.set_yticks([y + 0.4 for y in range(len(names))], list(reversed(names)), fontsize=FONT)
        axis.set_title(f"{os.path.splitext(os.path.basename(path))[0]}: step {length:.1f} ms, exposed {exposed:.1f} ms",
                       fontsize=FONT + 1, loc="left", fontweight="bold")
        axis.set_ylim(0, len(names) + 0.15)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[-1, 0].set_xlim(0, max(end - start for start, end in windows))
    axes[-1, 0].set_xlabel("ms" + (f" from the first {args.around} on" if args.around else " of the step"), fontsize=FONT)
    axes[-1, 0].tick_params(axis="x", labelsize=FONT)
    lines = legend(figure, plots, windows)
    figure.tight_layout(rect=(0, 0.22 * lines / figure.get_figheight(), 1, 1))
    save(figure, args.output)


def save(figure, output):
    temporary = f"{output}.tmp"
    try:
        figure.savefig(temporary, dpi=160, format=os.path.splitext(output)[1][1:])
        os.replace(temporary, output)
    except (ValueError, OSError) as e:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise UserError(f"{output}: {e}") from None


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
