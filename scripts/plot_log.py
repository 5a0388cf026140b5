#!/usr/bin/env python3
"""Plots runs, one over the other: loss, learning rate, tok/s, MFU, communication and what of it was exposed.

plot_log.py DIR_OR_FILE... -o out.png

Each is a folder of --out, a main.log or a file of --log-json; main.log alone has losses and learning rates. Needs
matplotlib.
"""
import argparse
import os
import sys

import logs

# title, axis, scale, what is drawn: series, style, label behind the run's name
PANELS = [
    ("loss", "nats a token", "linear", [("loss", "-", ""), ("val_loss", "--", " validation")]),
    ("learning rate", "", "linear", [("lr", "-", "")]),
    ("throughput", "tok/s", "linear", [("tok_s", "-", "")]),
    ("MFU", "of the peak", "linear", [("mfu", "-", "")]),
    ("communication", "ms a step", "symlog", [("comm_ms", ":", " as if not hidden"), ("exposed_ms", "-", " exposed")]),
]


def panels_of(runs):
    """The panels that some run has values for."""
    return [p for p in PANELS if any(name in series for _, series in runs for name, _, _ in p[3])]


def draw(axis, panel, runs):
    title, unit, scale, lines = panel
    for color, (run, series) in enumerate(runs):
        for name, style, label in lines:
            points = sorted(series.get(name, {}).items())
            if points:
                axis.plot([step for step, _ in points], [value for _, (value, _) in points], style,
                          color=f"C{color % 10}", linewidth=1, label=run + label)
    axis.set_title(title)
    axis.set_xlabel("step")
    axis.set_ylabel(unit)
    axis.set_yscale(scale)
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize="small")


def plot(runs, out):
    try:
        import matplotlib
    except ImportError:
        raise logs.UserError("needs matplotlib: python3 -m pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    panels = panels_of(runs)
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 3 * len(panels)), squeeze=False,
                                   constrained_layout=True)
    for row, panel in zip(axes, panels):
        draw(row[0], panel, runs)
    figure.savefig(out + ".tmp", dpi=120, format="png")
    os.replace(out + ".tmp", out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="DIR_OR_FILE")
    parser.add_argument("-o", "--out", default="log.png", metavar="PNG", help="(default: %(default)s)")
    args = parser.parse_args()
    try:
        plot(list(zip(logs.names(args.runs), map(logs.read, args.runs))), args.out)
    except logs.UserError as e:
        sys.exit(f"plot_log.py: {e}")
    except OSError as e:
        sys.exit(f"plot_log.py: {e.filename or args.out}: {e.strerror}")


if __name__ == "__main__":
    main()
