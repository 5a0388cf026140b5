#!/usr/bin/env python3
"""Writes event files for TensorBoard; needs nothing but Python.

to_tensorboard.py DIR_OR_FILE... --out DIR; then tensorboard --logdir DIR

Each is a folder of --out of the program, a main.log or a file of --log-json, and becomes a run: a folder of its name
in DIR, whose event file is written anew each time.

A file is records: uint64 length, its checksum, that many bytes, their checksum; little endian. The checksum is
CRC-32C, turned by 15 bits, plus a constant. The bytes are protocol buffers: an Event has wall_time (field 1, double),
step (2, varint), file_version (3, string; in the first one alone) and summary (5), a list of values (1), each with a
tag (1, string) and a simple_value (2, float).
"""
import argparse
import os
import struct
import sys

import logs

FILE = "events.out.tfevents.0.train_gpt"  # it must hold tfevents
TAGS = {"loss": "loss/train", "val_loss": "loss/validation", "eval": "eval/hellaswag", "norm": "gradient/norm",
        "loss_z": "loss/z", "norm_z": "gradient/norm_z", "ms": "step/ms", "comm_ms": "communication/ms",
        "exposed_ms": "communication/exposed_ms"}


def crc_table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82f63b78 if n & 1 else 0)
        table.append(n)
    return table


TABLE = crc_table()


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xffffffff


def checksum(data):
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff)


def record(data):
    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)


def varint(n):
    parts = bytearray()
    while n > 127:
        parts.append(n & 127 | 128)
        n >>= 7
    parts.append(n)
    return bytes(parts)


def field_bytes(number, data):
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def event(seconds, step, rest):
    return record(struct.pack("<Bd", 1 << 3 | 1, seconds) + bytes([2 << 3]) + varint(step) + rest)


def scalar(seconds, step, tag, value):
    summary = field_bytes(1, field_bytes(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, value))
    return event(seconds, step, field_bytes(5, summary))


def tag_of(name):
    return TAGS.get(name) or (f"communication/{name}" if name.startswith("exposed_by_op/") else f"run/{name}")


def write_run(series, seconds, folder):
    """seconds: the time of values that have none of their own."""
    events = sorted((step, tag_of(name), value, seconds if when is None else when)
                    for name, points in series.items() for step, (value, when) in points.items())
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, FILE)
    with open(path + ".tmp", "wb") as f:
        f.write(event(min(when for _, _, _, when in events), 0, field_bytes(3, b"brain.Event:2")))
        for step, tag, value, when in events:
            f.write(scalar(when, step, tag, value))
    os.replace(path + ".tmp", path)
    return path, len(events)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="DIR_OR_FILE")
    parser.add_argument("--out", required=True, metavar="DIR", help="for tensorboard --logdir")
    args = parser.parse_args()
    try:
        runs = [(name, logs.read(path), os.path.getmtime(path)) for name, path in zip(logs.names(args.runs), args.runs)]
        for name, series, seconds in runs:
            path, n = write_run(series, seconds, os.path.join(args.out, name))
            print(f"{path}: {n} values")
    except logs.UserError as e:
        sys.exit(f"to_tensorboard.py: {e}")
    except OSError as e:
        sys.exit(f"to_tensorboard.py: {e.filename or args.out}: {e.strerror}")


if __name__ == "__main__":
    main()
