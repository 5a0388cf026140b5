"""Hugging Face's files of a GPT-2, for export_hf.py and import_hf.py: safetensors and BPE tokenizers.

Safetensors is written and read here, by numpy alone: a number of 8 bytes, so many bytes of JSON, the data.
The package would want all tensors in memory at once, has no bf16 without PyTorch, and is none of Debian's.
Whatever is wrong with a file raises checkpoint.FormatError, whose text is one line.
"""

import json
import math
import os
import struct
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "dev"))
sys.dont_write_bytecode = True
import checkpoint as ck  # noqa: E402: its folder is on the path only now
from checkpoint import FormatError  # noqa: E402

BLOCK = 1 << 20  # elements converted at once
MOST_HEADER = 1 << 24  # bytes; the header of 1,024 layers has 2 MiB
MOST_JSON = 1 << 26
WEIGHTS, CONFIG = "model.safetensors", "config.json"
DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}  # bf16 as its bits
DTYPE_OF = {"fp32": "F32", "bf16": "BF16"}

# our tensor: its name there, and whether it is [in, out] there (a Conv1D's weight); ours are [out, in]
TENSORS = {
    "wte": ("wte.weight", False),
    "wpe": ("wpe.weight", False),
    "ln1w": ("h.{}.ln_1.weight", False),
    "ln1b": ("h.{}.ln_1.bias", False),
    "qkvw": ("h.{}.attn.c_attn.weight", True),
    "qkvb": ("h.{}.attn.c_attn.bias", False),
    "attprojw": ("h.{}.attn.c_proj.weight", True),
    "attprojb": ("h.{}.attn.c_proj.bias", False),
    "ln2w": ("h.{}.ln_2.weight", False),
    "ln2b": ("h.{}.ln_2.bias", False),
    "fcw": ("h.{}.mlp.c_fc.weight", True),
    "fcb": ("h.{}.mlp.c_fc.bias", False),
    "fcprojw": ("h.{}.mlp.c_proj.weight", True),
    "fcprojb": ("h.{}.mlp.c_proj.bias", False),
    "lnfw": ("ln_f.weight", False),
    "lnfb": ("ln_f.bias", False),
}


def pieces(config):
    """Yields name and shape there, and whether it is transposed, in our file's order; padding left out."""
    for name, shape in ck.tensor_shapes(config).items():
        theirs, transposed = TENSORS[name]
        if name == "wte":
            shape = (config["V"], config["C"])
        one = shape[1:] if "{}" in theirs else shape
        for layer in range(config["L"] if "{}" in theirs else 1):
            yield theirs.format(layer), one[::-1] if transposed else one, transposed


def padding(config):
    """Elements of wte's rows V ... Vp-1."""
    return (config["Vp"] - config["V"]) * config["C"]


def converted(x, dtype, want):
    """The bytes of an array of one of DTYPES as another, in blocks: memory stays at about one tensor."""
    flat = np.ascontiguousarray(x).reshape(-1)
    for at in range(0, flat.size, BLOCK):
        part = flat[at : at + BLOCK]
        if dtype != want:
            part = ck.bf16_floats(part) if dtype == "BF16" else part.astype("<f4")
            part = ck.bf16_bits(part) if want == "BF16" else part
        yield part.tobytes()


def read_elements(f, at, dtype, nelem, path):
    f.seek(at)
    x = np.fromfile(f, DTYPES[dtype], nelem)
    if x.size != nelem:
        raise FormatError(f"{path}: has become shorter: {x.size} of {nelem} elements could be read")
    return x


class Progress:
    """How much is done, on one line, where the output is a terminal."""

    def __init__(self, total):
        self.total, self.done, self.shown = total, 0, -1

    def add(self, n):
        self.done += n
        percent = 100 * self.done // self.total
        if percent != self.shown and sys.stderr.isatty():
            self.shown = percent
            end = "\n" if percent == 100 else ""
            print(f"\rweights: {percent} %", end=end, file=sys.stderr, flush=True)


# ---- JSON --------------------------------------------------------------------------------------------------
def unique_keys(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def parse_json(text, what):
    """bytes -> dict"""
    try:
        found = json.loads(text.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{what}: is not JSON: {' '.join(str(e).split())[:100]}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{what}: holds a {type(found).__name__}, want names with values")
    return found


def read_json(path):
    with open(path, "rb") as f:
        text = f.read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise FormatError(f"{path}: more than {MOST_JSON} bytes; no file of a GPT-2 model is so long")
    return parse_json(text, path)


def to_json(value):
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def is_count(x):
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


# ---- safetensors -------------------------------------------------------------------------------------------
def safetensors_header(tensors):
    """tensors: (name, dtype, shape) in the order in which their data follow."""
    table, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return struct.pack("<Q", len(text)) + text


class Safetensors:
    """A file, open, whose header has been checked. tensors: {name: (dtype, shape)}; read(name) -> array."""

    def __init__(self, path):
        self.path, self.f = path, open(path, "rb")
        nbytes = os.fstat(self.f.fileno()).st_size
        head = self.f.read(8)
        n = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if len(head) < 8 or n > nbytes - 8:
            raise FormatError(f"{path}: {nbytes} bytes, but a header of {n}: truncated, or not safetensors")
        if n > MOST_HEADER:
            raise FormatError(f"{path}: a header of {n} bytes; {MOST_HEADER} at most can be read")
        table = parse_json(self.f.read(n), f"{path}: header")
        table.pop("__metadata__", None)
        self.start, self.tensors, self.begins, at = 8 + n, {}, {}, 0
        for begin, end, name in sorted((*self._entry(name, entry), name) for name, entry in table.items()):
            if begin != at:
                how = "overlaps another" if begin < at else "leaves a gap"
                raise FormatError(f"{path}: tensor {name[:80]!r} {how}: it begins at byte {begin}, want {at}")
            at = end
        if at != nbytes - self.start:
            raise FormatError(f"{path}: {nbytes - self.start} bytes of data, but its header says {at}")

    def _entry(self, name, entry):
        """Where its data begin and end."""
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, span = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
        lists = isinstance(shape, list) and isinstance(span, list) and len(span) == 2
        if not (isinstance(dtype, str) and lists and all(is_count(x) for x in shape + span)):
            raise FormatError(f"{self.path}: tensor {name[:80]!r} has no dtype, shape and data_offsets")
        begin, end = span
        if end < begin or dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            what = f"{self.path}: tensor {name[:80]!r}, {dtype} {shape}"
            raise FormatError(f"{what}, has bytes {begin} to {end}")
        self.tensors[name], self.begins[name] = (dtype, tuple(shape)), begin
        return begin, end

    def read(self, name):
        dtype, shape = self.tensors[name]
        x = read_elements(self.f, self.start + self.begins[name], dtype, math.prod(shape), self.path)
        return x.reshape(shape)


# ---- tokenizers --------------------------------------------------------------------------------------------
def byte_characters():
    """What stands for each byte in vocab.json: its character in Latin-1 where that can be seen, else one of
    U+0100 on, in turn."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in seen]
    return {**{b: chr(b) for b in seen}, **{b: chr(0x100 + i) for i, b in enumerate(hidden)}}


BYTE_CHARACTERS = byte_characters()
CHARACTER_BYTES = {c: b for b, c in BYTE_CHARACTERS.items()}


def to_characters(token):
    return "".join(BYTE_CHARACTERS[b] for b in token)


def to_bytes(text):
    """A name in vocab.json -> its token's bytes. A special token may have characters of its own."""
    if all(c in CHARACTER_BYTES for c in text):
        return bytes(CHARACTER_BYTES[c] for c in text)
    return text.encode("utf-8", "replace")


def merges_of(path, tokens, special):
    """The pairs that byte pair encoding merges, in order, which a list of tokens does not hold: a token's
    number is its rank, and what merges into it are the two parts that the tokens before it leave of its
    bytes. special: number of a token that no merge makes."""
    ranks, merges = {}, []
    if len(set(tokens)) != len(tokens):
        raise FormatError(f"{path}: some tokens have the same bytes: this is no byte pair encoding")
    missing = set(range(256)) - {t[0] for t in tokens if len(t) == 1}
    if missing:
        raise FormatError(f"{path}: byte {min(missing)} is not a token: this is no byte pair encoding")
    for i, token in enumerate(tokens):
        if len(token) == 1 or i == special:
            continue
        parts = [token[j : j + 1] for j in range(len(token))]
        while len(parts) > 2:
            rank, j = min((ranks.get(a + b, i), j) for j, (a, b) in enumerate(zip(parts, parts[1:])))
            if rank == i:
                break
            parts[j : j + 2] = [parts[j] + parts[j + 1]]
        if len(parts) != 2:
            raise FormatError(f"{path}: token {i} is not of two before it: this is no byte pair encoding")
        merges.append(tuple(parts))
        ranks[token] = i
    return merges


def vocab_tokens(path, vocab):
    """{name: number} of a vocab.json -> list of bytes."""
    n = len(vocab)
    if not all(is_count(i) for i in vocab.values()) or sorted(vocab.values()) != list(range(n)):
        raise FormatError(f"{path}: the numbers of its {n} tokens are not 0 ... {n - 1}, each once")
    return [to_bytes(name) for name, _ in sorted(vocab.items(), key=lambda item: item[1])]
