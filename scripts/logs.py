"""Reads main.log and the file of --log-json, for the scripts beside it. What the lines hold: doc/logs.md."""
import glob
import json
import math
import os

MAIN_LOG = {"trl": "loss", "tel": "val_loss", "eval": "eval", "lr": "lr", "norm": "norm"}


class UserError(Exception):
    pass


def main_line(line):
    """s:0 trl:5.5 lr:0.0003 norm:2.9"""
    fields = dict(field.split(":", 1) for field in line.split())
    return int(fields.pop("s")), None, {MAIN_LOG[k]: float(v) for k, v in fields.items() if k in MAIN_LOG}


def json_line(line):
    values = json.loads(line)
    step, seconds = int(values.pop("step")), values.pop("time", None)
    for op, ms in values.pop("exposed_by_op", {}).items():
        values[f"exposed_by_op/{op}"] = ms
    return step, seconds, {k: float(v) for k, v in values.items() if isinstance(v, (int, float))}


def read_file(path, series):
    """Adds to {name: {step: (value, seconds or None)}}. A step that comes again, after a resume, replaces the first."""
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = f.read().split("\n")
    for i, line in enumerate(lines[:-1]):  # what follows the last newline is still being written
        if not line.strip():
            continue
        try:
            step, seconds, values = (json_line if line.startswith("{") else main_line)(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}, line {i + 1}: is neither of main.log nor of --log-json: {line[:60]!r}") from None
        for name, value in values.items():
            if math.isfinite(value):
                series.setdefault(name, {})[step] = (value, seconds)


def is_json_log(path):
    with open(path, "rb") as f:
        return f.read(8) == b'{"step":'


def read(path):
    """The series of a file, or of a folder: its main.log, and over it the files of --log-json that are there."""
    series = {}
    files = [path]
    if os.path.isdir(path):
        files = [f for f in [os.path.join(path, "main.log")] if os.path.exists(f)]
        files += [f for f in sorted(glob.glob(os.path.join(glob.escape(path), "*.json*"))) if is_json_log(f)]
    for f in files:
        read_file(f, series)
    if not series:
        raise UserError(f"{path}: no steps are logged there; want a main.log, a file of --log-json, or their folder")
    return series


def names(paths):
    """What to call each run: by its folder or file, or by its whole path where two would have the same name."""
    short = []
    for path in paths:
        path = os.path.normpath(path)
        folder, file = os.path.split(path)
        own = os.path.basename(os.path.abspath(folder)) if file == "main.log" else file
        short.append(os.path.splitext(own)[0] if os.path.isfile(path) and file != "main.log" else own)
    return [s if short.count(s) == 1 else p.strip("/").replace("/", "_") for s, p in zip(short, paths)]
