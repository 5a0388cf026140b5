#!/usr/bin/python3
"""Runs data/prepare_text.py on small texts and reads back, byte by byte, what it wrote. GPT-2's tokens need a
download, so of them only the cutting into documents is tested. Of data/shakespeare.sh, that it does nothing twice.
"""

import os, struct, subprocess, sys, tempfile

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))

sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import prepare_text

passed = failed = 0


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print(f"test_prepare.py: failed: {what}", file=sys.stderr)


def prepare(text, *options):
    with open(f"{tmp}/in.txt", "wb") as f:
        f.write(text)
    return subprocess.run([sys.executable, "data/prepare_text.py", f"{tmp}/in.txt", "--out", f"{tmp}/out",
                           *options], capture_output=True, text=True)


def refused(what, text, *options):
    before = sorted(os.listdir(f"{tmp}/out"))
    run = prepare(text, *options)
    check(run.returncode == 1 and what in run.stderr and run.stderr.count("\n") == 1, f"{what}: {run.stderr}")
    check(sorted(os.listdir(f"{tmp}/out")) == before, f"{what}: nothing is left behind")


def tokens(name, magic=20240520, version=1, code="H"):
    """A shard's tokens; its header and its size are checked."""
    with open(f"{tmp}/out/{name}", "rb") as f:
        raw = f.read()
    head = struct.unpack("<256i", raw[:1024])
    n = head[2]
    check(head[:2] == (magic, version) and not any(head[3:]), f"{name}: header")
    check(len(raw) == 1024 + n * struct.calcsize(code), f"{name}: size")
    return bytes(struct.unpack(f"<{n}{code}", raw[1024:]))


with tempfile.TemporaryDirectory() as tmp:
    text = "Naïve — 漢字\r\n".encode() * 50
    n, nval = len(text), len(text) // 10
    run = prepare(text, "--name", "a")
    check(run.returncode == 0, run.stderr)
    check(f"train: {n - nval} tokens in 1 shard\nval: {nval} tokens in 1 shard\n" in run.stdout, run.stdout)
    check(sorted(os.listdir(f"{tmp}/out")) == ["a_tokenizer.bin", "a_train_000000.bin", "a_val_000000.bin"],
          "three files and no other")
    check(tokens("a_train_000000.bin") + tokens("a_val_000000.bin") == text, "the shards hold the text")

    with open(f"{tmp}/out/a_tokenizer.bin", "rb") as f:
        raw = f.read()
    check(struct.unpack("<256I", raw[:1024]) == (20240328, 2, 256, 10, *[0] * 252), "tokenizer: header")
    check(raw[1024:] == b"".join(bytes([1, i]) for i in range(256)), "tokenizer: tokens")

    # 4 bytes a token, several shards of about equal length, another part to validate
    run = prepare(text, "--name", "b", "--uint32", "--shard-tokens", "100", "--val-fraction", "0.3")
    check(run.returncode == 0, run.stderr)
    whole = b""
    for split, total in (("train", n - int(n * 0.3)), ("val", int(n * 0.3))):
        shards = sorted(f for f in os.listdir(f"{tmp}/out") if f.startswith(f"b_{split}"))
        parts = [tokens(f, 20240801, 7, "I") for f in shards]
        lengths = [len(p) for p in parts]
        whole += b"".join(parts)
        check(sum(lengths) == total and len(parts) == -(-total // 100), f"{split}: number of shards")
        check(max(lengths) <= 100 and max(lengths) - min(lengths) <= 1, f"{split}: lengths {lengths}")
    check(whole == text, "many shards hold the text, in order")

    run = prepare(text, "--name", "c", "--val-fraction", "0")
    check(run.returncode == 0 and tokens("c_train_000000.bin") == text, "all to train")
    check(not os.path.exists(f"{tmp}/out/c_val_000000.bin"), "none to validate")
    run = prepare(text + text, "--name", "a")
    check(run.returncode == 0 and len(tokens("a_train_000000.bin")) == 2 * n - 2 * n // 10, "again, over it")

    refused("b_train_000001.bin is left from an earlier run", text, "--name", "b")
    refused("byte 0xff at position 6", b"Na\xc3\xafve\xff", "--name", "d")
    refused("byte 0xc3 at position 2", b"Na\xc3", "--name", "d")
    refused("makes 0 tokens", b"", "--name", "d")
    refused("at least 2 each", b"abcdefghijk", "--name", "d")
    refused("0 <= F < 1", text, "--name", "d", "--val-fraction", "1")
    refused("--shard-tokens 1", text, "--name", "d", "--shard-tokens", "1")
    refused("without a folder", text, "--name", "x/d")
    refused("--vocab goes with", text, "--name", "d", "--vocab", "x", "y")
    run = subprocess.run([sys.executable, "data/prepare_text.py", f"{tmp}/none.txt", "--out", f"{tmp}/out",
                          "--name", "d"], capture_output=True, text=True)
    check(run.returncode == 1 and "none.txt: No such file" in run.stderr, run.stderr)

    # the checks of UTF-8 and of the separator hold wherever a block ends
    stream = "é<|endoftext|><|endoftext|>b\n漢<|endoftext|>".encode()
    for block in range(1, len(stream) + 1):
        prepare_text.BLOCK = block
        with open(f"{tmp}/in.txt", "wb") as f:
            f.write(stream)
        got = list(prepare_text.documents(prepare_text.read_utf8(f"{tmp}/in.txt")))
        check(got == ["é", "b\n漢"], f"documents in blocks of {block}: {got}")

    os.makedirs(f"{tmp}/there")
    for f in ("shakespeare.txt", "shakespeare_train_000000.bin", "shakespeare_val_000000.bin",
              "shakespeare_tokenizer.bin", "SOURCE"):
        with open(f"{tmp}/there/{f}", "w") as g:
            g.write("x")
    run = subprocess.run(["bash", "data/shakespeare.sh", f"{tmp}/there"], capture_output=True, text=True)
    check(run.returncode == 0 and "is there already: x" in run.stdout, "shakespeare.sh: where all is there")
    check(len(os.listdir(f"{tmp}/there")) == 5, "shakespeare.sh: nothing is added")

print(f"{passed} passed, {failed} failed")
sys.exit(failed != 0)
