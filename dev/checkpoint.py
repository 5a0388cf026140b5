#!/usr/bin/env python3
"""Reads and writes llm.c's files in Python: models, states, token shards, tokenizers. Needs numpy.

    python3 dev/checkpoint.py FILE...      says what each file is, and checks it

From Python:  import checkpoint; config, params = checkpoint.read_model("model_00000100.bin")
The formats are described in doc/formats.md. All is little endian; a header is 256 int32, unused words 0.
Whatever is wrong with a file raises FormatError; its text is one line: the file, the values, what is wanted.
"""

import math
import os
import sys

import numpy as np

MODEL_MAGIC, MODEL_FP32, MODEL_BF16 = 20240326, 3, 5
STATE_MAGIC, STATE_VERSION = 20240327, 2
SHARD_MAGIC, SHARD_VERSION = 20240520, 1  # uint16 tokens
SHARD32_MAGIC, SHARD32_VERSION = 20240801, 7  # uint32 tokens
TOKENIZER_MAGIC = 20240328
OPTIMIZER_MAGIC, OPTIMIZER_VERSION = 20261129, 2  # ours
LLMC_MAGIC, LLMC_VERSION = 20240527, 1  # of one rank of llm.c
KINDS = {
    MODEL_MAGIC: "a model",
    STATE_MAGIC: "a debug state",
    SHARD_MAGIC: "a token shard",
    SHARD32_MAGIC: "a token shard",
    TOKENIZER_MAGIC: "a tokenizer",
    OPTIMIZER_MAGIC: "an optimizer state",
    LLMC_MAGIC: "an optimizer state of llm.c",
}
HEADER_NBYTES = 1024


class FormatError(ValueError):
    """A file that is not what its reader wants."""


def padded_vocab(V):
    """V rounded up to a multiple of 128."""
    return (V + 127) // 128 * 128


def make_config(maxT, V, L, NH, C):
    """The numbers of a model, under the names that every function here uses."""
    return dict(maxT=maxT, V=V, Vp=padded_vocab(V), L=L, NH=NH, C=C)


def tensor_shapes(config):
    """{name: shape} of the 16 tensors in the order of the files. Weights are [out, in]."""
    L, C = config["L"], config["C"]
    return {
        "wte": (config["Vp"], C),
        "wpe": (config["maxT"], C),
        "ln1w": (L, C),
        "ln1b": (L, C),
        "qkvw": (L, 3 * C, C),
        "qkvb": (L, 3 * C),
        "attprojw": (L, C, C),
        "attprojb": (L, C),
        "ln2w": (L, C),
        "ln2b": (L, C),
        "fcw": (L, 4 * C, C),
        "fcb": (L, 4 * C),
        "fcprojw": (L, C, 4 * C),
        "fcprojb": (L, C),
        "lnfw": (C,),
        "lnfb": (C,),
    }


DECAYED = ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")  # AdamW's weight decay: weights, not vectors


def num_parameters(config):
    """Parameters in the files, those of the padded rows of wte included."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


# ---- bf16 --------------------------------------------------------------------------------------------------
def bf16_bits(x):
    """float32 -> uint16 bits of the nearest bf16, ties to even; a NaN stays a NaN."""
    u = np.ascontiguousarray(x, dtype="<f4").view("<u4")
    rounded = (u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16
    nan = (u >> 16) | 0x40
    return np.where((u & 0x7FFFFFFF) > 0x7F800000, nan, rounded).astype("<u2")


def bf16_floats(bits):
    """uint16 bits of bf16 -> float32."""
    return (np.asarray(bits, dtype="<u2").astype("<u4") << 16).view("<f4")


# ---- files -------------------------------------------------------------------------------------------------
def _write(path, parts):
    """The whole file or none of it: written beside its place, then moved there."""
    tmp = f"{path}.tmp"
    try:
        with open(tmp, "wb") as f:
            for part in parts:
                f.write(part)
        os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def _header(words):
    h = np.zeros(256, dtype="<i4")
    for i, word in words.items():
        h[i] = word
    return h.tobytes()


def _read(path):
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror}") from None


def _words(path, data, what, magics):
    """The header of `data` as int32, its magic checked against {magic: versions}."""
    if len(data) < HEADER_NBYTES:
        raise FormatError(f"{path}: {len(data)} bytes, but a {what} starts with a header of {HEADER_NBYTES}")
    h = np.frombuffer(data, "<i4", 256)
    if int(h[0]) not in magics:
        hint = f" (this is {KINDS[int(h[0])]})" if int(h[0]) in KINDS else ""
        hint = " (the bytes are swapped: a big-endian file)" if int(h[0].byteswap()) in magics else hint
        want = " or ".join(str(m) for m in magics)
        raise FormatError(f"{path}: magic {h[0]}, but a {what} has {want}{hint}")
    versions = magics[int(h[0])]
    if int(h[1]) not in versions:
        want = " or ".join(str(v) for v in versions)
        raise FormatError(f"{path}: version {h[1]} of a {what}; {want} can be read")
    return h


def _check_nbytes(path, have, what, nbytes):
    if have != nbytes:
        raise FormatError(f"{path}: {have} bytes, but its header says that the {what} has {nbytes}")


def _check_shapes(config, tensors):
    for name, shape in tensor_shapes(config).items():
        if name not in tensors or tuple(np.shape(tensors[name])) != shape:
            got = tuple(np.shape(tensors[name])) if name in tensors else "nothing"
            raise FormatError(f"tensor {name} has shape {got}, want {shape}")


def _split(config, flat):
    tensors, at = {}, 0
    for name, shape in tensor_shapes(config).items():
        nelem = int(np.prod(shape))
        tensors[name] = flat[at : at + nelem].reshape(shape).copy()
        at += nelem
    return tensors


# ---- models ------------------------------------------------------------------------------------------------
def _config_of(path, h):
    names = ("maxT", "V", "L", "NH", "C", "Vp")
    config = {name: int(h[2 + i]) for i, name in enumerate(names)}
    bad = [f"{name}={value}" for name, value in config.items() if value < 1]
    if bad:
        raise FormatError(f"{path}: {', '.join(bad)}; sizes of a model are at least 1")
    if config["Vp"] < config["V"]:
        raise FormatError(f"{path}: padded vocabulary Vp={config['Vp']} is smaller than V={config['V']}")
    if config["C"] % config["NH"] != 0:
        raise FormatError(f"{path}: C={config['C']} is not a multiple of NH={config['NH']} heads")
    return config


def _model_header(path, head, nbytes):
    h = _words(path, head, "model", {MODEL_MAGIC: (MODEL_FP32, MODEL_BF16)})
    config = _config_of(path, h)
    width = 4 if int(h[1]) == MODEL_FP32 else 2
    _check_nbytes(path, nbytes, "model", HEADER_NBYTES + width * num_parameters(config))
    return config, int(h[1])


def read_model_header(path):
    """-> (config, version 3 or 5), all checked but the weights, which are not read."""
    try:
        with open(path, "rb") as f:
            return _model_header(path, f.read(HEADER_NBYTES), os.fstat(f.fileno()).st_size)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read: {e.strerror}") from None


def model_header(config, version):
    """The first 1024 bytes of a model file."""
    words = {0: MODEL_MAGIC, 1: version}
    words.update({2 + i: config[name] for i, name in enumerate(("maxT", "V", "L", "NH", "C", "Vp"))})
    return _header(words)


def read_model(path):
    """-> (config, {name: float32 array}); a bf16 file (version 5) is widened."""
    data = _read(path)
    config, version = _model_header(path, data, len(data))
    width = 4 if version == MODEL_FP32 else 2
    body = np.frombuffer(data, "<f4" if width == 4 else "<u2", offset=HEADER_NBYTES)
    return config, _split(config, body if width == 4 else bf16_floats(body))


def write_model(path, config, params, version=MODEL_FP32):
    """Version 3 holds fp32, 5 bf16, rounded to nearest."""
    if version not in (MODEL_FP32, MODEL_BF16):
        raise FormatError(f"{path}: version {version} of a model; 3 (fp32) and 5 (bf16) can be written")
    _check_shapes(config, params)
    flat = (np.ascontiguousarray(params[name], dtype="<f4") for name in tensor_shapes(config))
    body = (x.tobytes() if version == MODEL_FP32 else bf16_bits(x).tobytes() for x in flat)
    _write(path, [model_header(config, version), *body])


# ---- debug states: a batch, and what a model makes of it ---------------------------------------------------
def read_state(path, config):
    """-> dict of B, T, x, y, logits, loss, grads: see write_state. config: of the model it is for."""
    data = _read(path)
    h = _words(path, data, "debug state", {STATE_MAGIC: (STATE_VERSION,)})
    B, T, V = int(h[2]), int(h[3]), config["V"]
    if B < 1 or not 1 <= T <= config["maxT"]:
        raise FormatError(
            f"{path}: B={B}, T={T}, but B is at least 1 and T 1 ... {config['maxT']}, the model's maxT"
        )
    nfloats = B * T * V + 1 + num_parameters(config)
    _check_nbytes(path, len(data), "debug state of this model", HEADER_NBYTES + 4 * (2 * B * T + nfloats))
    ids = np.frombuffer(data, "<i4", 2 * B * T, HEADER_NBYTES).reshape(2, B, T)
    rest = np.frombuffer(data, "<f4", nfloats, HEADER_NBYTES + ids.nbytes)
    if ids.min() < 0 or ids.max() >= V:
        raise FormatError(f"{path}: tokens {ids.min()} ... {ids.max()}, want 0 ... {V - 1}")
    logits, loss, grads = rest[: B * T * V], rest[B * T * V], rest[B * T * V + 1 :]
    return dict(
        B=B,
        T=T,
        x=ids[0].copy(),
        y=ids[1].copy(),
        logits=logits.reshape(B, T, V).copy(),
        loss=float(loss),
        grads=_split(config, grads),
    )


def write_state(path, config, x, y, logits, loss, grads):
    """x, y [B, T]; logits [B, T, V], V unpadded; grads of all 16 tensors, wte's padded to Vp rows."""
    B, T = np.shape(x)
    _check_shapes(config, grads)
    if np.shape(y) != (B, T) or np.shape(logits) != (B, T, config["V"]):
        raise FormatError(
            f"{path}: x {np.shape(x)}, y {np.shape(y)}, logits {np.shape(logits)} do not fit together"
        )
    _write(
        path,
        [
            _header({0: STATE_MAGIC, 1: STATE_VERSION, 2: B, 3: T}),
            np.ascontiguousarray(x, dtype="<i4").tobytes(),
            np.ascontiguousarray(y, dtype="<i4").tobytes(),
            np.ascontiguousarray(logits, dtype="<f4").tobytes(),
            np.array(loss, dtype="<f4").tobytes(),
            *(np.ascontiguousarray(grads[name], dtype="<f4").tobytes() for name in tensor_shapes(config)),
        ],
    )


# ---- optimizer states --------------------------------------------------------------------------------------
def read_optimizer(path):
    """Ours -> (config, step, [m, v, master], each {name: float32 array})."""
    data = _read(path)
    h = _words(path, data, "optimizer state", {OPTIMIZER_MAGIC: (OPTIMIZER_VERSION,)})
    config = _config_of(path, h[1:])
    blobs = int(h[14:16].view("<u8")[0]) + int(h[16:18].view("<u8")[0])
    n = num_parameters(config)
    _check_nbytes(path, len(data), "optimizer state", HEADER_NBYTES + blobs + 12 * n)
    flat = np.frombuffer(data, "<f4", 3 * n, HEADER_NBYTES + blobs)
    return config, int(h[2]), [_split(config, flat[i * n : (i + 1) * n]) for i in range(3)]


def write_llmc_states(folder, step, config, arrays, nproc=1, zero=0, shard=0, sample=0):
    """What llm.c's ranks leave beside the model file, data not shuffled: state_%08d_%05d.bin, and DONE_%08d.

    arrays: m, v and, unless left out, master. zero 1: of each layer a rank has one of nproc equal parts.
    """
    for x in arrays:
        _check_shapes(config, x)
    parts = nproc if zero else 1
    flat = []  # an array: the layers of all tensors, cut
    for x in arrays:
        layers = [np.asarray(t, "<f4").reshape(t.shape[0] if n not in ("wte", "wpe", "lnfw", "lnfb") else 1, -1)
                  for n, t in ((name, x[name]) for name in tensor_shapes(config))]
        if any(t.shape[1] % parts for t in layers):
            raise FormatError(f"{folder}: {nproc} ranks do not divide every layer: llm.c has no such state")
        flat.append([t.reshape(len(t), parts, -1) for t in layers])
    for rank in range(nproc):
        words = {0: LLMC_MAGIC, 1: LLMC_VERSION, 2: nproc, 3: rank, 4: len(arrays) == 3, 10: step}
        words.update({30: shard, 32: sample})
        body = (np.ascontiguousarray(t[:, rank % parts]).tobytes() for x in flat for t in x)
        _write(os.path.join(folder, f"state_{step:08}_{rank:05}.bin"), [_header(words), *body])
    _write(os.path.join(folder, f"DONE_{step:08}"), [])


# ---- token shards ------------------------------------------------------------------------------------------
def read_shard(path):
    """-> the tokens, uint16 or uint32 as the file has them."""
    data = _read(path)
    magics = {SHARD_MAGIC: (SHARD_VERSION,), SHARD32_MAGIC: (SHARD32_VERSION,)}
    h = _words(path, data, "token shard", magics)
    dtype = np.dtype("<u2" if int(h[0]) == SHARD_MAGIC else "<u4")
    ntok = int(h[2])
    if ntok < 0:
        raise FormatError(f"{path}: {ntok} tokens; a shard has 0 ... {2**31 - 1}")
    _check_nbytes(path, len(data), "shard", HEADER_NBYTES + dtype.itemsize * ntok)
    return np.frombuffer(data, dtype, ntok, HEADER_NBYTES).copy()


def write_shard(path, tokens, wide=False):
    """uint16, or uint32 if wide."""
    tokens = np.asarray(tokens)
    limit = 2**32 if wide else 2**16
    if tokens.ndim != 1 or tokens.size >= 2**31:
        raise FormatError(f"{path}: tokens of shape {tokens.shape}; a shard takes one row of fewer than 2^31")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < limit:
        raise FormatError(f"{path}: tokens {tokens.min()} ... {tokens.max()}, want 0 ... {limit - 1}")
    magic, version = (SHARD32_MAGIC, SHARD32_VERSION) if wide else (SHARD_MAGIC, SHARD_VERSION)
    body = np.ascontiguousarray(tokens, dtype="<u4" if wide else "<u2").tobytes()
    _write(path, [_header({0: magic, 1: version, 2: tokens.size}), body])


# ---- tokenizers --------------------------------------------------------------------------------------------
def read_tokenizer(path):
    """-> (list of bytes, one a token; end-of-text token)."""
    data = _read(path)
    h = _words(path, data, "tokenizer", {TOKENIZER_MAGIC: (1, 2)})
    ntok, eot = int(h[2]), int(h[3]) if int(h[1]) == 2 else 50256
    tokens, at = [], HEADER_NBYTES
    for i in range(ntok):
        n = data[at] if at < len(data) else 0
        if n == 0 or at + 1 + n > len(data):
            raise FormatError(f"{path}: ends, or has an empty token, at token {i} of {ntok}")
        tokens.append(data[at + 1 : at + 1 + n])
        at += 1 + n
    _check_nbytes(path, len(data), "tokenizer", at)
    if not 0 <= eot < ntok:
        raise FormatError(f"{path}: end-of-text token {eot}, want 0 ... {ntok - 1}")
    return tokens, eot


def write_tokenizer(path, tokens, eot):
    """tokens: bytes objects of 1 to 255 bytes. Version 2."""
    for i, token in enumerate(tokens):
        if not 1 <= len(token) <= 255:
            raise FormatError(f"{path}: token {i} has {len(token)} bytes, want 1 ... 255")
    if not 0 <= eot < len(tokens):
        raise FormatError(f"{path}: end-of-text token {eot}, want 0 ... {len(tokens) - 1}")
    body = b"".join(bytes([len(token)]) + bytes(token) for token in tokens)
    _write(path, [_header({0: TOKENIZER_MAGIC, 1: 2, 2: len(tokens), 3: eot}), body])


# ---- for people --------------------------------------------------------------------------------------------
def describe(path):
    """One line, or a table for a model, that says what a file holds."""
    with open(path, "rb") as f:
        head = f.read(16)
    if len(head) < 16:
        raise FormatError(f"{path}: {len(head)} bytes: none of llm.c's files")
    magic, version, a, b = (int(word) for word in np.frombuffer(head, "<i4"))
    if magic == MODEL_MAGIC:
        config, params = read_model(path)
        sizes = ", ".join(f"{name}={value}" for name, value in config.items())
        rows = [
            f"{path}: model, {'fp32' if version == MODEL_FP32 else 'bf16'}, {sizes}, "
            f"{num_parameters(config):,} parameters"
        ]
        for name, x in params.items():
            shape = "x".join(str(n) for n in x.shape)
            rows.append(f"  {name:<9} {shape:<14} mean {x.mean():+.4e}  std {x.std():.4e}")
        return "\n".join(rows)
    if magic in (SHARD_MAGIC, SHARD32_MAGIC):
        tokens = read_shard(path)
        span = f", {tokens.min()} ... {tokens.max()}" if tokens.size else ""
        return f"{path}: shard of {tokens.size:,} {tokens.dtype.name} tokens{span}"
    if magic == TOKENIZER_MAGIC:
        tokens, eot = read_tokenizer(path)
        return f"{path}: tokenizer of {len(tokens):,} tokens, end of text is {eot}"
    if magic == STATE_MAGIC:
        return f"{path}: debug state, version {version}, B={a}, T={b} (to check it, its model is needed)"
    if magic == OPTIMIZER_MAGIC:
        config, step, _ = read_optimizer(path)
        return f"{path}: optimizer state after step {step}, {num_parameters(config):,} parameters"
    if magic == LLMC_MAGIC:
        return f"{path}: optimizer state of llm.c, rank {b} of {a} (to check it, its model is needed)"
    raise FormatError(f"{path}: magic {magic}: none of llm.c's models, states, shards, tokenizers")


def main(paths):
    if not paths or paths[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr if not paths else sys.stdout)
        return 0 if paths and paths[0] in ("-h", "--help") else 1
    for path in paths:
        try:
            print(describe(path))
        except FormatError as e:
            print(e, file=sys.stderr)
            return 1
        except OSError as e:
            print(f"{path}: cannot be read: {e.strerror}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
