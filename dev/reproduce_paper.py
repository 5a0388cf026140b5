#!/usr/bin/python3
"""reproduce_paper.py FOLDER OUT -- doc/reproduction.md and its plots from what dev/reproduce_paper.sh has measured.

FOLDER holds the JSON files of bench_overlap and predict_layer; OUT is where reproduction.md and
reproduction_*.png go. The figures of the paper stand here, PAPER; all others come from the files.
"""
import datetime
import json
import os
import platform
import sys

# arXiv 2604.24013: d_model 4096, TP 4, forward passes, means of 10 runs; the accelerator is not named
PAPER = {
    "mlp": {"slice": "-31.4 %; 83.9 %", "flash": "-36.9 %; 99.8 %"},  # Table 1, of 122.3 ms, 43.8 of them exposed
    "range": {"slice": ("29.5 to 35.0", "77.9 to 85.2"), "flash": ("35.0 to 40.2", "99.7 to 99.8")},  # Table 3, %
    "attention_4096": {"none": 270.1, "slice": 246.1, "row": 230.9, "query-split": 215.8},  # Table 4, ms
    "attention_8192": {"none": 195.6, "slice": 279.7, "query-split": 145.1},
}
RATIOS = ("0.25", "0.5", "1", "1.25", "1.5", "2", "3", "4")
COLORS = {"none": "#8c8c8c", "slice:4": "#c28f2c", "slice:6": "#d1a44b", "slice:8": "#e0b96a", "row:1": "#54a24b",
          "flash:1": "#4c78a8", "flash:2": "#7d6bb0"}


class Table:
    """One table of a bench: its first one, for there is one a file."""

    def __init__(self, folder, name):
        with open(os.path.join(folder, name + ".json"), encoding="utf-8") as f:
            self.t = json.load(f)["tables"][0]
        self.modes = {m["mode"]: m for m in self.t["modes"]}

    def noisy(self, mode):
        """Do its rounds lie too far apart for a verdict? The bound of dev/bench/bench.h."""
        m = self.modes[mode]
        return m["total_p75"] - m["total_p25"] > 0.15 * m["total_ms"]

    def layer(self, mode):
        return self.modes[mode]["total_ms"]

    def exposed(self, mode):
        return self.modes[mode]["exposed_ms"]

    def gain(self, mode):
        """% by which the layer is faster than without overlap."""
        return 100 * (1 - self.layer(mode) / self.layer("none"))

    def hidden(self, mode):
        """% of what is exposed without overlap."""
        return 100 * (1 - self.exposed(mode) / self.exposed("none"))

    def doubtful(self, mode):
        """Is its gain? That takes both."""
        return self.noisy(mode) or self.noisy("none")

    def bars(self, modes):
        """The gains that a plot shows: of modes that are there, and not too noisy."""
        return {m: self.gain(m) for m in modes if m in self.modes and not self.doubtful(m)}

    def spread(self, mode):
        """The gain with the layer at its p75 and p25, against the median without overlap."""
        return tuple(100 * (1 - self.modes[mode][f"total_{p}"] / self.layer("none")) for p in ("p75", "p25"))


def percent(x):
    return f"{x:.1f} %"


def gains(table, mode):
    """Gain and hidden share; the spread where there is more than one round."""
    if table is None or mode not in table.modes:
        return "-"
    if table.doubtful(mode):
        return "too noisy"
    text = f"{-table.gain(mode):+.1f} %; {table.hidden(mode):.1f} %"
    if table.t["rounds"] > 1:
        text += " ({:.1f} to {:.1f})".format(*table.spread(mode))
    return text


def rows(head, lines):
    return "\n".join(["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"] +
                     ["| " + " | ".join(line) + " |" for line in lines])


def full(table):
    """All that a table has, a line a mode."""
    lines = [[mode] + (["too noisy"] * 4 if table.noisy(mode) else
                       [f"{table.layer(mode):.2f}",
                        "{:+.1f} % ({:.1f} to {:.1f})".format(-table.gain(mode), *table.spread(mode)),
                        f"{table.exposed(mode):.2f}", percent(table.hidden(mode))]) +
             [f"{table.modes[mode]['predicted_ms']:.2f}"] for mode in table.modes]
    return rows(["schedule", "layer ms", "against none (quartiles)", "exposed ms", "hidden", "closed form ms"], lines)


def told(table):
    t = table.t
    return (f"P={t['ranks']}, {t['rows']} tokens, {t['width']} channels; computation W {t['compute_ms']:.1f} ms, communication T "
            f"{t['comm_ms']:.1f} ms, T/W {t['comm_ms'] / t['compute_ms']:.3f}; {t['rounds']} rounds, other processes kept "
            f"{t['foreign_cores']:.2f} cores busy")


def draw(path, title, groups, bars, note):
    """Bars of gain: groups {name: {bar: value}}."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8.6, 3.6))
    width = 0.8 / len(bars)
    for i, bar in enumerate(bars):
        at = [g + i * width for g, name in enumerate(groups) if bar in groups[name]]
        values = [groups[name][bar] for name in groups if bar in groups[name]]
        drawn = axes.bar(at, values, width * 0.94, label=bar, color=COLORS.get(bar, "#9d755d"))
        axes.bar_label(drawn, fmt="%.0f", fontsize=7)
    axes.set_xticks([g + width * (len(bars) - 1) / 2 for g in range(len(groups))], list(groups), fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("layer faster than none, %", fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncol=len(bars), loc="lower right", bbox_to_anchor=(1, 1))
    axes.margins(y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.text(0.01, 0.01, note, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path + ".tmp", format="png", dpi=110)
    pyplot.close(figure)
    os.replace(path + ".tmp", path)


def table1(get):
    """The MLP layer, three ways."""
    ways = {"emulated link, P=2": get("mlp_2"), "P=4": get("mlp_4"), "P=8": get("mlp_8"), "hosts, P=2": get("network_2"),
            "hosts, P=4": get("network_4"), "predicted, paper's shape": get("predicted_mlp")}
    ways = {name: t for name, t in ways.items() if t}
    lines = []
    for mode, name in (("slice:4", None), ("slice:6", "slice"), ("slice:8", None), ("flash:1", "flash"), ("flash:2", None)):
        lines.append([mode, PAPER["mlp"].get(name, "-")] + [gains(t, mode) for t in ways.values()])
    return rows(["schedule", "paper, Table 1", *ways], lines), ways


def table3(get):
    """Sequence lengths from 1K to 16K with 131,072 tokens in all."""
    lengths = {s: get("predicted_mlp" if s == 4096 else f"predicted_mlp_{s}") for s in (1024, 2048, 4096, 8192, 16384)}
    lines = []
    for mode, name in (("slice:6", "slice"), ("flash:1", "flash")):
        gain, hidden = PAPER["range"][name]
        lines.append([mode, f"{gain} %; {hidden} %", gains(get("mlp_4"), mode), gains(get("network_4"), mode)] +
                     [gains(t, mode) for t in lengths.values()])
    return rows(["schedule", "paper, Table 3: gain; hidden", "any length, measured, emulated link", "hosts",
                 *(f"{s // 1024}K, predicted" for s in lengths)], lines)


def table4(get):
    """The attention layer."""
    lines = []
    for name, shape in (("attention_4096", "(16, 4096)"), ("attention_8192", "(4, 8192)"),
                        ("attention_8192_more", "(4, 8192), T/W 0.5")):
        paper, measured, predicted = PAPER.get(name, {}), get(name), get("predicted_" + name)
        hosts = get("network_" + name)
        if not (paper or measured):
            continue
        for mode, key in (("slice:4", "slice"), ("row:1", "row"), ("flash:1", "query-split"), ("flash:2", None)):
            known = f"{100 * (paper[key] / paper['none'] - 1):+.1f} %" if key in paper else "-"
            lines.append([shape, {"row:1": "row-parallel flash", "flash:1": "query-split, flash:1",
                                  "flash:2": "query-split, flash:2"}.get(mode, mode), known, gains(measured, mode),
                          gains(hosts, mode), gains(predicted, mode)])
    return rows(["(batch, tokens)", "schedule", "paper, Table 4", "measured at its ratios, emulated link", "hosts",
                 "predicted, Table 1's machine"], lines)


def crossover(get):
    lines = []
    for ratio in RATIOS:
        t = get("ratio_" + ratio)
        if t:
            lines.append([ratio, f"{t.t['comm_ms'] / t.t['compute_ms']:.2f}"] +
                         ["too noisy" if t.doubtful(m) else f"{-t.gain(m):+.1f} %; {t.hidden(m):.0f} %"
                          for m in ("slice:4", "slice:8", "flash:1", "flash:2")])
    return rows(["t_m/t_c", "T/W", "slice:4", "slice:8", "flash:1", "flash:2"], lines)


TEXT = """# The paper's tables, measured and predicted

Written by `dev/reproduce_paper.sh{quick}` on {date}: {machine}. The paper is arXiv 2604.24013 (first *FlashOverlap*, later
*CommFuse*; Karim et al., 2026). Its figures are of d_model 4096, TP 4, forward passes, on an accelerator that it does not name.

- *Measured* here at sizes that two cores can do, at the paper's ratio of communication to computation (T/W): each GEMM and
  attention really computes, and lasts as long as on an accelerator of a given rate ([dev/bench](../dev/bench/README.md)
  says how). The link is emulated between threads, or is a network: hosts that are network namespaces, joined by rate-limited
  links, Open MPI over TCP (`dev/cluster.sh`).
- *Predicted* at the paper's own shapes: the same layer, queued on a simulated device ([prediction.md](prediction.md)). Rate and
  link of [its machine](../dev/sim/hardware/ascend.txt) come from one row, vanilla of Table 1; all else follows.

Cells: time of the layer against no overlap; share of the exposed communication that is hidden; in brackets the gain
of the layer's quartiles, of {rounds} rounds in which the schedules take turns.

## Table 1: the MLP layer

{table1}

![gain of the MLP layer](reproduction_mlp.png)

{told}{network}
What differs, and why:

- *flash:1 with two ranks* has only half of the layer to hide a message under, flash:2 three quarters: with
  t_m/t_c above 1 the closed form says what is left ([overlap.md](overlap.md)).
- *Slices.* The paper does not say into how many it cuts. In M slices 1/M of the communication stays exposed, and 7.1 of 43.8 ms are
  between 1/6 and 1/7; so its figures stand beside slice:6. Its machine does a slice in one GEMM; here a slice is computed owner by
  owner, so that all schedules have the same bits. The simulated machine has no cost of small GEMMs, so that does not show.
- *Four hosts.* A collective alone, whose time is T, takes longer there than behind computation, so none exposes less than T and there
  is less to gain than T/W says. Both take longer than their bytes would on the link, which two hosts need to the percent: a host that
  is early shares the link of the next peer with one that is late.

Real computation at full speed, not paced, on two ranks and two cores (copies, sums and the scheduler take part):

{unpaced}

## Table 3: 1K to 16K tokens

131,072 tokens in all, as there. An MLP does not know where a sequence ends, so the prediction is the same in each column, and
what was measured at P=4 for Table 1 holds for each; the paper's range is that of its measurements.

{table3}

## Table 4: the attention layer

At the paper's ratios: T/W is taken from vanilla and query-split as if that hid all, so it is the least that it can have been, and
attention weighs as much beside the projection as its row-parallel time says.

{table4}

![gain of the attention layer](reproduction_attention.png)

- The order is the paper's: query-split, row-parallel flash, slices, none; but for (4, 8192), where attention is so much that the
  projection hides next to nothing and row-parallel flash is level with slices. The paper has no row-parallel figure there, and slices
  that are slower than none (279.7 against 195.6 ms), which it does not explain. No schedule of ours computes more in slices, so
  nothing here shows it.
- *At (4, 8192)* and T/W 0.35 the gather takes as long as all of QKV. The paper computes that first, so all but its last chunk is there to
  hide the gather; here attention of the shards before hides it, too ([overlap.md](overlap.md), "Attention, in time"). 25.8 % is all
  that this T/W allows. If the paper's schedule left a part exposed, T/W was larger there: hence the rows at 0.5.
- *Predicted on Table 1's machine* more is gained than the paper reports, and the paper's own tables do not go together: query-split saves
  54.3 ms at (16, 4096), while at Table 1's link both collectives take 21.9 ms. So Table 4 was not measured with the link, or not with the
  attention, that a machine of Table 1's rates has; 216 ms are left for computation, of which its GEMMs would take 20. Only the
  order is compared.

Where the projection alone can hide least: the reduce-scatter lasts twice as long as it (`bench_overlap --op attention`):

{weak}

## Firsts: the backward pass

The paper has none, so these compare with nothing. The MLP's backward pass (B1 gather under fc2's dgrad, B2 gather again under its
weight gradient, B3 reduce-scatter under fc1's dgrad and weight gradient) and attention's (B4 to B6), on the same links:

MLP, P=4, emulated link:

{mlp_backward}

Attention, P=4, emulated link:

{attention_backward}

Ulysses' all-to-alls (U1 to U4) and data parallelism (D1 to D3) are measured in whole steps: README.md, "Measured", and
`bench_mesh` ([dev/bench](../dev/bench/README.md)).

## Where flash does not win

The MLP layer at P=4 with more and more communication: from t_m/t_c = 1.33, T = W, on it can't be hidden, and what is left of the gain is the
computation that was hidden instead; flash:1 comes down to slices (closed form: no better than slicing in P\\*M). Below 0.25 there is little to gain.

{crossover}

![the crossover](reproduction_crossover.png)

Short messages lose, too: slices and flash:M with M > 1 send M times as many, and each costs the link's latency again
([dev/bench](../dev/bench/README.md), "Where it does not win"). On a GPU none of this has been measured.
"""


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: reproduce_paper.py FOLDER OUT")
    folder, out = sys.argv[1:]
    get = lambda name: Table(folder, name) if os.path.exists(os.path.join(folder, name + ".json")) else None
    text1, ways = table1(get)
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        cpu = next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    note = f"{datetime.date.today()}, {os.cpu_count()} cores, {cpu}"
    bars = ["slice:4", "slice:6", "slice:8", "flash:1", "flash:2"]
    groups = {"paper\n(slices: M not told)": {"slice:6": 31.4, "flash:1": 36.9}}
    groups.update({name.replace(", ", "\n"): t.bars(bars) for name, t in ways.items()})
    draw(os.path.join(out, "reproduction_mlp.png"), "MLP layer, T/W 0.558", groups, bars, note)
    groups, bars = {}, ["slice:4", "row:1", "flash:1", "flash:2"]
    for name, shape in (("attention_4096", "(16, 4096)"), ("attention_8192", "(4, 8192)")):
        p, t = PAPER[name], get(name)
        groups[f"paper {shape}"] = {bar: 100 * (1 - p[key] / p["none"]) for bar, key in
                                    (("slice:4", "slice"), ("row:1", "row"), ("flash:1", "query-split")) if key in p}
        if t:
            groups[f"measured {shape}"] = t.bars(bars)
    draw(os.path.join(out, "reproduction_attention.png"), "Attention layer", groups, bars, note)
    bars = ["slice:4", "slice:8", "flash:1", "flash:2"]
    groups = {f"t_m/t_c {r}": t.bars(bars) for r in RATIOS if (t := get("ratio_" + r))}
    draw(os.path.join(out, "reproduction_crossover.png"), "MLP layer, P=4: more and more communication", groups, bars, note)
    lost = os.path.join(folder, "no_network.txt")
    network = ""
    if os.path.exists(lost):
        with open(lost, encoding="utf-8") as f:
            network = f"\n- No hosts were made: {f.read().strip()}\n"
    names = {"mlp_2": "Emulated link", "mlp_4": "Emulated link", "mlp_8": "Emulated link", "network_2": "Hosts", "network_4": "Hosts"}
    text = TEXT.format(
        quick="" if get("predicted_mlp_1024") else " --quick", date=datetime.date.today(),
        machine=f"{os.cpu_count()} cores of {cpu}, {platform.system()} {platform.release()}",
        rounds=get("mlp_4").t["rounds"], table1=text1, network=network,
        told="".join(f"- {kind}: {told(get(name))}.\n" for name, kind in names.items() if get(name)),
        unpaced=full(get("mlp_unpaced")), table3=table3(get), table4=table4(get), weak=full(get("attention_weak")),
        mlp_backward=full(get("mlp_backward")), attention_backward=full(get("attention_backward")),
        crossover=crossover(get))
    path = os.path.join(out, "reproduction.md")
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(path + ".tmp", path)


main()
