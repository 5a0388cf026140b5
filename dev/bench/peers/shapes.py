"""What the programs of this folder share: names of models, as train_gpt's -e has them, and numbers of options."""

import argparse
import re

SIZES = {6: (384, 6), 12: (768, 12), 24: (1024, 16), 36: (1280, 20), 48: (1600, 25)}  # layers: channels, heads


def sizes_of(text):
    """d12, or L=2,C=64,NH=2,V=256,maxT=64 -> dict with these names."""
    match = re.fullmatch(r"d(\d+)", text)
    if match and int(match[1]) in SIZES:
        C, NH = SIZES[int(match[1])]
        return dict(L=int(match[1]), C=C, NH=NH, V=50257, maxT=1024)
    sizes = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)(?:,|$)", text)}
    if sorted(sizes) != ["C", "L", "NH", "V", "maxT"] or not all(sizes.values()) or sizes["C"] % sizes["NH"]:
        depths = ", ".join(f"d{depth}" for depth in SIZES)
        raise argparse.ArgumentTypeError(f"{text}: want one of {depths}, or sizes as in L=2,C=64,NH=2,V=256,maxT=64")
    return sizes


def positive(text):
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: want a number of at least 1")
    return value
