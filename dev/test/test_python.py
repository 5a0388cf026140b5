#!/usr/bin/python3
"""Are dev/checkpoint.py and the fixture right? Needs numpy; with torch, dev/reference.py --check runs too.

The fixture's logits, loss and gradients come from PyTorch's autograd. Here they are checked by other means: a
forward pass in numpy (dev/forward.py), straight from the files, and for each tensor the slope of that loss along its gradient.
Closes with 'N passed, N failed', as every test does. The interpreter is the one that apt installs numpy for.
"""

import os
import subprocess
import sys
import tempfile
import traceback

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "dev"))
sys.dont_write_bytecode = True
import checkpoint as ck  # noqa: E402: its folder is on the path only now
from forward import forward  # noqa: E402

FIXTURE = os.path.join(ROOT, "dev", "fixture")
counts = {True: 0, False: 0}


def check(ok, claim):
    counts[bool(ok)] += 1
    if not ok:
        print(f"test_python.py: failed: {claim}", file=sys.stderr)


def refuses(function, text, claim):
    """The call raises FormatError, on one line, with `text` in it."""
    try:
        function()
        said = "nothing"
    except ck.FormatError as e:
        said = str(e)
    check(text in said and "\n" not in said, f"{claim}: wanted '{text}', got '{said}'")


def fixture(name):
    return os.path.join(FIXTURE, name)


# ---- the fixture -------------------------------------------------------------------------------------------
def check_model(name):
    config, params = ck.read_model(fixture(f"{name}.bin"))
    state = ck.read_state(fixture(f"{name}_debug_state.bin"), config)
    p = {t: x.astype(np.float64) for t, x in params.items()}
    logits, losses = forward(p, state["x"], state["y"], config)
    loss = float(losses.mean())
    check(np.abs(logits - state["logits"]).max() < 1e-6 * np.abs(logits).max(), f"{name}: logits")
    check(abs(loss - state["loss"]) < 1e-6 * loss, f"{name}: loss {loss} {state['loss']}")
    check(np.array_equal(state["x"].ravel()[1:], state["y"].ravel()[:-1]), f"{name}: y is x shifted by one")
    check({0, config["V"] - 1} <= set(state["x"].ravel()), f"{name}: first and last token occur")
    check(not params["wte"][config["V"] :].any(), f"{name}: padding rows of wte are 0")
    check(not state["grads"]["wte"][config["V"] :].any(), f"{name}: their gradient is 0")
    for tensor, grad in state["grads"].items():
        direction = grad.astype(np.float64) / np.linalg.norm(grad)
        step, slope = 1e-4, 0.0
        for sign in (1.0, -1.0):
            moved = dict(p, **{tensor: p[tensor] + sign * step * direction})
            slope += sign * forward(moved, state["x"], state["y"], config)[1].mean() / (2.0 * step)
        want = np.linalg.norm(grad.astype(np.float64))
        check(abs(slope - want) < 1e-5 * want, f"{name}: slope along d {tensor} is {slope}, want {want}")
        check(np.abs(grad).max() > 1e-4, f"{name}: d {tensor} is far above rounding")
    return config, params, state


def check_steps(name, config, params, state):
    with open(fixture(f"{name}_steps.txt")) as f:
        rows = [row.split() for row in f if not row.startswith("#")]
    steps = [[float(w) for w in row[1:]] for row in rows if row[0] == "step"]
    check([int(s[0]) for s in steps] == list(range(1, 11)), f"{name}: steps 1 ... 10")
    check(abs(steps[0][1] - state["loss"]) < 1e-6, f"{name}: the first step's loss is the debug state's")
    norm = np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in state["grads"].values()))
    check(abs(steps[0][2] - norm) < 1e-6 * norm, f"{name}: so is the norm of its gradient")
    check(all(a[1] > b[1] for a, b in zip(steps, steps[1:])), f"{name}: the loss falls")
    values = [row for row in rows if row[0] == "value"]
    check({row[1] for row in values} == set(ck.tensor_shapes(config)), f"{name}: values of each tensor")
    check(all(np.float32(b) == params[t].flat[int(i)] for _, t, i, b, _ in values), f"{name}: values before")
    # each of these elements has a gradient of one sign or nearly: it moves about lr a step, against that sign
    toward = [(float(a) - float(b)) * -np.sign(state["grads"][t].flat[int(i)]) for _, t, i, b, a in values]
    check(0.0 < min(toward) and max(toward) < 0.012, f"{name}: values move {min(toward)} ... {max(toward)}")


# ---- the formats -------------------------------------------------------------------------------------------
def check_bf16():
    x = np.array(
        [1.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20, -0.0, np.inf, 3.4e38], np.float32
    )
    want = np.array([0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F80, 0x7F80], np.uint16)
    check(np.array_equal(ck.bf16_bits(x), want), "bf16 rounds to nearest, ties to even")
    check(np.isnan(ck.bf16_floats(ck.bf16_bits(np.array([np.nan], np.float32))))[0], "a NaN stays a NaN")
    low_nan = np.array([0x7F800001], "<u4").view("<f4")
    check(np.isnan(ck.bf16_floats(ck.bf16_bits(low_nan)))[0], "a NaN with low bits alone stays a NaN")
    bits = np.arange(65536, dtype=np.uint16)
    finite = (bits & 0x7F80) != 0x7F80
    check(
        np.array_equal(ck.bf16_bits(ck.bf16_floats(bits))[finite], bits[finite]),
        "bf16 values round to themselves",
    )
    config, narrow = ck.read_model(fixture("even_bf16.bin"))
    wide = ck.read_model(fixture("even.bin"))[1]
    check(config == ck.read_model(fixture("even.bin"))[0], "both versions of a model have its sizes")
    same = all(
        np.array_equal(ck.bf16_floats(ck.bf16_bits(wide[t])).reshape(wide[t].shape), narrow[t]) for t in wide
    )
    check(same, "version 5 is version 3, rounded")


def check_round_trips(tmp, config, params, state):
    path = os.path.join(tmp, "out.bin")
    for version, source in ((ck.MODEL_FP32, "even.bin"), (ck.MODEL_BF16, "even_bf16.bin")):
        ck.write_model(path, config, params, version)
        check(read_bytes(path) == read_bytes(fixture(source)), f"version {version}: written as it was read")
    ck.write_state(path, config, **{k: state[k] for k in ("x", "y", "logits", "loss", "grads")})
    check(
        read_bytes(path) == read_bytes(fixture("even_debug_state.bin")), "debug state: written as it was read"
    )
    layers = {name: x.reshape(len(x) if x.shape[0] == config["L"] else 1, -1) for name, x in params.items()}
    for zero in (0, 1):  # the second of two ranks, of each layer: all, or the second half
        ck.write_llmc_states(tmp, 7, config, [state["grads"], params], nproc=2, zero=zero, shard=3, sample=9)
        name = os.path.join(tmp, "state_00000007_00001.bin")
        data = np.frombuffer(read_bytes(name), "<i4")
        words = [int(data[i]) for i in (0, 1, 2, 3, 4, 5, 10, 30, 32)]
        check(words == [20240527, 1, 2, 1, 0, 0, 7, 3, 9], f"llm.c's state, its header: {words}")
        half = [row[zero * len(row) // 2 :] for x in layers.values() for row in x]
        body = data[256:].view("<f4")
        check(len(body) == 2 * ck.num_parameters(config) // (1 + zero), f"its size, -z {zero}")
        check(np.array_equal(body[len(body) // 2 :], np.concatenate(half)), f"its second array, -z {zero}")
        check("of llm.c, rank 1 of 2" in ck.describe(name), "it is described")
    for name in os.listdir(tmp):
        if name != "out.bin":
            os.remove(os.path.join(tmp, name))
    for wide, top, width in ((False, 65535, 2), (True, 128255, 4)):
        tokens = np.array([50256, 0, 1, top], np.int64)
        ck.write_shard(path, tokens, wide)
        back = ck.read_shard(path)
        check(np.array_equal(back, tokens) and back.itemsize == width, f"shard of {width}-byte tokens")
        check(os.path.getsize(path) == 1024 + 4 * width, f"its size, {width}-byte tokens")
    ck.write_shard(path, [])
    check(ck.read_shard(path).size == 0, "an empty shard")
    words = [b"a", b" the", bytes(range(255)), b"<|endoftext|>"]
    ck.write_tokenizer(path, words, 3)
    check(ck.read_tokenizer(path) == (words, 3), "tokenizer")
    check(os.listdir(tmp) == ["out.bin"], "writers leave nothing else behind")


def read_bytes(path):
    with open(path, "rb") as f:
        return f.read()


def check_refusals(tmp, config):
    good, path = read_bytes(fixture("even.bin")), os.path.join(tmp, "bad.bin")

    def bad(data, function, text, claim):
        with open(path, "wb") as f:
            f.write(data)
        refuses(lambda: function(path), text, claim)

    def word(i, value):
        return good[: 4 * i] + int(value).to_bytes(4, "little", signed=True) + good[4 * i + 4 :]

    refuses(lambda: ck.read_model(os.path.join(tmp, "none.bin")), "cannot be read", "missing")
    bad(b"", ck.read_model, "0 bytes", "empty")
    bad(good[:-4], ck.read_model, f"{len(good) - 4} bytes", "truncated")
    bad(good + b"\0", ck.read_model, f"{len(good) + 1} bytes", "too long")
    bad(word(0, 1), ck.read_model, "magic 1,", "wrong magic")
    swapped = np.frombuffer(good, "<i4").byteswap().tobytes()
    bad(swapped, ck.read_model, "big-endian", "wrong endian")
    bad(word(1, 2), ck.read_model, "version 2", "wrong version")
    bad(word(5, 5), ck.read_model, "not a multiple of NH=5", "heads that do not divide")
    bad(word(4, 0), ck.read_model, "L=0", "no layers")
    bad(word(7, 66), ck.read_model, "smaller than V=67", "padded vocabulary below the vocabulary")
    bad(good, ck.read_shard, "magic 20240326", "a model is no shard")
    bad(good, lambda p: ck.read_state(p, config), "magic 20240326", "a model is no debug state")
    bad(good, ck.read_tokenizer, "magic 20240326", "a model is no tokenizer")
    ck.write_shard(path, [1, 2, 3])
    shard = read_bytes(path)
    bad(shard[:-1], ck.read_shard, "1029 bytes", "truncated shard")
    bad(shard[:8] + b"\xff\xff\xff\xff" + shard[12:], ck.read_shard, "-1 tokens", "negative count")
    state = read_bytes(fixture("even_debug_state.bin"))
    bad(state[:12] + b"\x21" + state[13:], lambda p: ck.read_state(p, config), "T=33", "T above maxT")
    bad(state[:1024] + b"\x43" + state[1025:], lambda p: ck.read_state(p, config), "... 67", "a token >= V")
    ck.write_tokenizer(path, [b"ab", b"c"], 1)
    tokenizer = read_bytes(path)
    bad(tokenizer[:-1], ck.read_tokenizer, "token 1 of 2", "truncated tokenizer")
    before = read_bytes(path)
    refuses(lambda: ck.write_shard(path, [65536]), "65536", "a token too large for uint16")
    refuses(lambda: ck.write_model(path, config, {}), "tensor wte", "a model without tensors")
    refuses(lambda: ck.write_tokenizer(path, [b"", b"a"], 1), "token 0", "an empty token")
    check(read_bytes(path) == before, "a refused write leaves the file as it was")


def check_programs(tmp, config):
    paths = [fixture("even.bin"), fixture("even_bf16.bin"), fixture("even_debug_state.bin")]
    tool = [sys.executable, os.path.join(ROOT, "dev", "checkpoint.py")]
    ran = subprocess.run(tool + paths, capture_output=True, text=True)
    count = f"{ck.num_parameters(config):,} parameters"
    check(ran.returncode == 0 and ran.stdout.count(count) == 2, f"checkpoint.py FILE...: {ran.stderr}")
    with open(os.path.join(tmp, "short.bin"), "wb") as f:
        f.write(b"x")
    ran = subprocess.run(tool + [f.name], capture_output=True, text=True)
    check(ran.returncode == 1 and ran.stderr.count("\n") == 1, "checkpoint.py says what is wrong in one line")


def check_reference():
    """With torch: the fixture is what dev/reference.py makes, with the ten steps of torch's own AdamW."""
    try:
        import torch
    except ImportError:
        print("no torch for this Python: dev/reference.py not checked")
        return
    import reference

    script = os.path.join(ROOT, "dev", "reference.py")
    ran = subprocess.run([sys.executable, "-B", script, "--check"], capture_output=True, text=True)
    check(ran.returncode == 0, f"dev/reference.py --check: {ran.stdout}{ran.stderr}")
    config, params = ck.read_model(fixture("odd.bin"))
    state = ck.read_state(fixture("odd_debug_state.bin"), config)
    x, y = (torch.from_numpy(state[name].astype(np.int64)) for name in ("x", "y"))
    start = reference.to_torch(params, torch.float64)
    losses, _, after, _ = reference.train(start, [(x, y)] * reference.NSTEPS, config)
    ours = {name: p.clone().requires_grad_() for name, p in start.items()}
    vectors = [p for name, p in ours.items() if name.startswith("ln") or name.endswith("b")]
    weights = [ours[name] for name in ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")]
    groups = [dict(params=weights, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for t in range(10):
        loss = reference.forward(ours, x, y, config)[1]
        check(abs(loss.item() - losses[t]) < 1e-6, f"loss of step {t + 1} with torch's AdamW")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ours.values(), 1.0)
        optimizer.step()
    # torch clips by norm + 1e-6, hence 1e-5
    for name, p in ours.items():
        a, b = (reference.without_k(name, q.detach() - start[name], config) for q in (p, after[name]))
        check((a - b).norm() < 1e-5 * b.norm(), f"change of {name} in ten steps with torch's AdamW")


def main():
    try:
        loaded = {}
        for name in ("even", "odd"):
            loaded[name] = check_model(name)
            check_steps(name, *loaded[name])
        check_bf16()
        check_reference()
        for body, args in (
            (check_round_trips, loaded["even"]),
            (check_refusals, loaded["even"][:1]),
            (check_programs, loaded["even"][:1]),
        ):
            with tempfile.TemporaryDirectory() as tmp:
                body(tmp, *args)
    except Exception:  # a check that cannot even run has failed; the rest of its output is for people
        traceback.print_exc()
        counts[False] += 1
    print(f"{counts[True]} passed, {counts[False]} failed")
    return int(counts[False] != 0 or counts[True] == 0)


if __name__ == "__main__":
    sys.exit(main())
