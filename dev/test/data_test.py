#!/usr/bin/python3
"""Runs data/prepare.py and data/hellaswag.py and reads back, byte by byte, what they wrote. Downloads come
from a server of this test, which misbehaves; runs are killed at each rename, and at other moments, and go on.

tiktoken is not needed: a module of that name, made here, cuts words as GPT-2 does and numbers them, so that a
text that was cut in a wrong place has other tokens.
"""

import contextlib, fcntl, gzip, hashlib, http.server, io, json, lzma, os, pty, random, re, shutil, signal
import struct, subprocess, sys, tarfile, tempfile, termios, threading, time, traceback, zipfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
os.chdir(ROOT)
sys.dont_write_bytecode = True
sys.path.insert(0, "data")
import fetch, hellaswag, prepare, readers, report, tokens
from report import UserError

passed = failed = 0
TIKTOKEN = r"""
import re, zlib
WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
class Encoding:
    def encode_ordinary(self, text): return [zlib.crc32(w.encode()) % 50256 for w in WORDS.findall(text)]
    def decode_single_token_bytes(self, i): return b"%d" % i
def get_encoding(name): return Encoding()
"""


def check(ok, what):
    global passed, failed
    passed, failed = passed + bool(ok), failed + (not ok)
    if not ok:
        print(f"data_test.py: failed: {what}", file=sys.stderr)


def write(name, data):
    path = f"{tmp}/{name}"
    with open(path, "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())
    return path


def read(path):
    with open(path, "rb") as f:
        return f.read()


def run(*args, program="prepare.py", **env):
    """The program's exit status and outputs. Without worker processes it is a fork of this one: quicker."""
    args = [*map(str, args)]
    if "gpt2" in args and "--workers 1" not in " ".join(args) and program == "prepare.py":
        return subprocess.run([sys.executable, "data/prepare.py", *args], capture_output=True, text=True,
                              env={**ENV, **env})
    with open(f"{tmp}/stdout", "w+") as out, open(f"{tmp}/stderr", "w+") as err:
        sys.stdout.flush()  # or the child says it once more
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(env)
            sys.path.insert(0, f"{tmp}/stub")
            in_child(program, args)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(args, status, out.read(), err.read())


def in_child(program, args):
    """Runs a program in this process, which has been forked for it, and ends it."""
    sys.argv, status = [program, *args], 0
    try:
        (prepare if program == "prepare.py" else hellaswag).main()
    except SystemExit as e:
        status = 1
        print(e, file=sys.stderr)
    except BaseException:
        status = 2
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def made(*args, **env):
    result = run(*args, **env)
    check(result.returncode == 0, f"{args}: {result.stderr}")
    return result.stdout


def refused(says, *args, program="prepare.py", left=None, **env):
    """One line of error that holds `says`; what the folder of shards held is as it was, or `left`."""
    before = sorted(f for f in os.listdir(OUT) if f.endswith(".bin")) if left is None else left
    result = run(*args, program=program, **env)
    check(result.returncode == 1 and says in result.stderr and result.stderr.count("\n") == 1,
          f"refused with '{says}': {result.stderr}")
    there = sorted(f for f in os.listdir(OUT) if f.endswith(".bin") and not f.startswith("."))
    check(there == before, f"{says}: nothing is left behind: {there}")


def shard(path, width=2):
    """A shard's tokens; its header and its length are checked."""
    raw = read(path)
    head = struct.unpack("<256i", raw[:1024])
    kind = (20240520, 1) if width == 2 else (20240801, 7)
    check(head[:2] == kind and not any(head[3:]), f"{path}: header")
    check(len(raw) == 1024 + head[2] * width, f"{path}: length")
    return list(struct.unpack(f"<{head[2]}{'H' if width == 2 else 'I'}", raw[1024:]))


def shards(name, out=None, width=2):
    """(file, tokens) of a name's shards, in order."""
    out = out or OUT
    files = [f for f in os.listdir(out) if f.startswith((f"{name}_val_", f"{name}_train_"))]
    files.sort(key=lambda f: f[-10:])
    return [(f, shard(f"{out}/{f}", width)) for f in files]


def whole(name, out=None, width=2):
    return [t for _, part in shards(name, out, width) for t in part]


def words(text):
    return module["Encoding"]().encode_ordinary(text)


def gpt2(*documents):
    return [t for d in documents for t in [50256] + words(d)]


# ---- what the shards hold ----------------------------------------------------------------------------------
def test_cuts():
    text = "Naïve — 漢字\r\n".encode() * 50
    n = len(text)
    path = write("in.txt", text)
    said = made(path, "--out", OUT, "--name", "a")
    check(f"train: {n - n // 10} tokens in 1 shard\nval: {n // 10} tokens in 1 shard\n" in said, said)
    check(sorted(os.listdir(OUT)) == ["a.json", "a_tokenizer.bin", "a_train_000001.bin", "a_val_000000.bin"],
          "four files and no other")
    check(bytes(whole("a")) == text, "the shards hold the text, validation first")
    raw = read(f"{OUT}/a_tokenizer.bin")
    check(struct.unpack("<256I", raw[:1024]) == (20240328, 2, 256, 10, *[0] * 252), "tokenizer: header")
    check(raw[1024:] == b"".join(bytes([1, i]) for i in range(256)), "tokenizer: tokens")
    check("is there already" in made(path, "--out", OUT, "--name", "a"), "a second time")

    # n tokens in shards of S: all full but the last two, which are equal
    S = 100
    for nval in (None, 0, 37):
        for n in (11, 99, 100, 101, 199, 200, 201, 250, 300, 301, 737):
            path = write("cut.txt", (text * 2)[:n].decode(errors="ignore").ljust(n)[:n])
            data, out = read(path), f"{tmp}/cut"
            n = len(data)
            args = [path, "--out", out, "--name", "c", "--shard-tokens", str(S)]
            args += [] if nval is None else ["--val-tokens", str(nval)]
            status = run(*args).returncode
            v = nval if nval is not None else n // 10 if n < 2 * S else S
            if n < v + 2 or v == 1:
                check(status == 1 and not shards("c", out), f"{n} tokens, {v} to validate: refused")
                shutil.rmtree(out)
                continue
            parts = shards("c", out)
            lengths = [len(p) for _, p in parts]
            check(status == 0 and bytes(whole("c", out)) == data, f"n={n} val={nval}: the text")
            check([f for f, _ in parts] == ["c_val_000000.bin"] * (v > 0) +
                  [f"c_train_{i:06d}.bin" for i in range(1, len(parts) + (v == 0))],
                  f"n={n} val={nval}: names")
            train = lengths[v > 0:]
            check(v == 0 or lengths[0] == v, f"n={n} val={nval}: {lengths}, {v} to validate")
            check(len(train) == -(-(n - v) // S) and train[:-2] == [S] * len(train[:-2]) and
                  (len(train) < 2 or 0 <= train[-1] - train[-2] <= 1), f"n={n} val={nval}: {lengths}")
            shutil.rmtree(out)

    made(path, "--out", OUT, "--name", "w", "--uint32", "--shard-tokens", 100)
    check(bytes(whole("w", width=4)) == read(path), "four bytes a token")
    refused("with other shard_tokens", path, "--out", OUT, "--name", "w", "--uint32")
    write("cut.txt", "other text, of another length")
    refused("with other files", path, "--out", OUT, "--name", "w", "--uint32", "--shard-tokens", 100)
    made(path, "--out", OUT, "--name", "w", "--force")
    check(bytes(whole("w")) == b"other text, of another length", "--force")
    refused("No such file", f"{tmp}/gone.txt", "--out", OUT, "--name", "w", "--force")
    check(bytes(whole("w")) == b"other text, of another length", "--force without an input removes nothing")
    with open(f"{OUT}/story.json", "w") as f:
        f.write('[{"text": "a"}]')
    refused("would be overwritten", f"{OUT}/story.json", "--out", OUT, "--name", "story", "--force")
    check(os.path.exists(f"{OUT}/story.json"), "an input is no record")
    os.remove(f"{OUT}/w.json")
    refused("is of an earlier run", path, "--out", OUT, "--name", "w")


def test_tokens():
    stream = "é<|endoftext|><|endoftext|>b\n漢<|endoftext|>"
    for block in range(1, len(stream.encode()) + 1):
        readers.BLOCK = block
        got = []
        for begins, text in readers.text_documents(readers.utf8(io.BytesIO(stream.encode()), "x"),
                                                   "<|endoftext|>", False):
            got += [text] if begins else [got.pop() + text]
        check(got == ["é", "b\n漢"], f"documents in blocks of {block}: {got}")
    readers.BLOCK = 1 << 20

    # a text that is cut has the tokens of the whole, and each piece is as short as can be
    rng = random.Random(1)
    parts = ["a", "Zoë", " ", "  ", "\n", "\n\n", "\t", "1", "'s", "'", "_", "—", "\u00a0", "\u3000",
             "\x1c", "\r\n", "漢"]
    plain = "".join(rng.choice(parts) for _ in range(4000))
    sys.path.insert(0, f"{tmp}/stub")
    bpe = tokens.Gpt2Tokens()
    tokens.PIECE = 5
    for step in (1, 3, 1000, 10000):
        blocks = [(i == 0, plain[i:i + step]) for i in range(0, len(plain), step)]
        pieces = list(bpe.pieces(blocks))
        check("".join(t for _, t in pieces) == plain and [b for b, _ in pieces] == [True] + [False] *
              (len(pieces) - 1), f"pieces of blocks of {step}: the text")
        check([w for _, t in pieces for w in words(t)] == words(plain), f"pieces of blocks of {step}: words")
        check(len(pieces) > 400, f"{len(pieces)} pieces")
    tokens.PIECE = 1 << 20

    docs = ["The king.\n", " a  b", "x" * 10, "漢 字"]
    path = write("docs.txt", "<|endoftext|>".join(docs[:3]) + "<|endoftext|>" + docs[3])
    args = ["--out", OUT, "--tokenizer", "gpt2", "--val-tokens", 0]
    made(path, *args, "--name", "g", "--workers", 1)
    check(whole("g") == gpt2(*docs), "documents begin with 50256")
    lines = "\n".join(json.dumps({"id": 1, "text": d}) for d in docs) + "\n\n"
    for name, data in (("d.jsonl", lines.encode()), ("d.jsonl.gz", gzip.compress(lines.encode())),
                       ("d.ndjson.xz", lzma.compress(lines.encode())),
                       ("d.json", json.dumps([{"text": d} for d in docs], indent=2).encode()),
                       ("d.jsonl.zst", subprocess.run(["zstd", "-qc"], input=lines.encode(), stdout=-1).stdout
                        if shutil.which("zstd") else None)):
        if data is not None:
            made(write(name, data), *args, "--name", name, "--workers", 1)
            check(whole(name) == gpt2(*docs), name)
    made(write("b.jsonl", lines), "--out", OUT, "--name", "bytes", "--val-tokens", 0)
    check(bytes(whole("bytes")) == "".join("\n" + d for d in docs).encode(), "bytes of documents")
    made(write("f.jsonl", '{"body": "b c"}\n'), *args, "--name", "field", "--field", "body", "--workers", 1)
    check(whole("field") == gpt2("b c"), "--field")


def tar_of(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return out.getvalue()


def test_archives():
    one, two = (json.dumps([{"text": f"{c} story"} for c in cs]).encode() for cs in ("ab", "cd"))
    path = write("t.tar.gz", tar_of([("../../escape.json", one), ("/abs/x.json.gz", gzip.compress(two)),
                                     ("README", b"\xff"), ("n.txt", b"plain")]))
    out = f"{tmp}/deep/er"
    said = made(path, "--out", out, "--name", "t", "--val-tokens", 0)
    want = b"\na story\nb story\nc story\nd story"
    check(bytes(whole("t", out)) == want + b"plain", "tar: the documents, in order")
    check("1 files of other kinds passed over" in said, said)
    everywhere = [os.path.join(d, f) for d, _, fs in os.walk(tmp) for f in fs]
    check(not any(f.endswith(("escape.json", "x.json")) for f in everywhere) and not os.path.exists("/abs"),
          "tar: nothing is unpacked")
    with zipfile.ZipFile(f"{tmp}/z.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("../escape.json", one)
        z.writestr("two.json", two)
    made(f"{tmp}/z.zip", "--out", OUT, "--name", "z", "--val-tokens", 0)
    check(bytes(whole("z")) == want, "zip: the documents, in order")
    refused("cut.tar.gz: is broken", write("cut.tar.gz", read(path)[:-40]), "--out", OUT, "--name", "e")
    refused("is broken", write("no.tar", b"x" * 2000), "--out", OUT, "--name", "e2")
    refused("is broken", write("no.zip", b"x" * 2000), "--out", OUT, "--name", "e3")
    refused("is broken", write("no.txt.gz", b"x" * 2000), "--out", OUT, "--name", "e4")


def test_bad_input():
    def bad(says, name, data, *options):
        refused(says, write(name, data), "--out", OUT, "--name", f"x{passed}", "--val-tokens", "0", *options)
    bad("bad.jsonl line 2: is not JSON", "bad.jsonl", '{"text": "a"}\n{"text": "b"\n')
    bad("line 1: is not JSON", "deep.jsonl", "[" * 100000 + "\n")
    bad("line 2: no text in field 'text'; there is: body, id", "field.jsonl",
        '{"text": "a"}\n{"id": 1, "body": "b"}\n')
    bad("no text in field 'text'; there is: int", "int.jsonl", "3\n")
    bad("line 1: no text in field 'text'", "type.jsonl", '{"text": 3}\n')
    bad("line 1: half of a surrogate pair", "half.jsonl", '{"text": "\\ud800"}\n')
    bad("line 2: is not UTF-8: byte 0xff at position 10", "utf.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n')
    bad("ends before its array does", "open.json", '[{"text": "a"},')
    bad("object 2 is not JSON", "cut.json", '[{"text": "a"}, {"te')
    bad("is not a JSON array", "object.json", '{"text": "a"}')
    bad("is not UTF-8: byte 0xff at position 6", "utf.txt", b"Na\xc3\xafve\xff")
    bad("byte 0xc3 at position 2", "end.txt", b"Na\xc3")
    bad("makes 0 tokens", "empty.txt", b"")
    bad("makes 0 tokens", "empty.jsonl", b"\n\n")
    bad("at least 2 to train", "one.txt", b"a")
    bad("12 of them to validate", "small.txt", b"abcdefghijk", "--val-tokens", "12")
    refused("1 of them to validate", f"{tmp}/small.txt", "--out", OUT, "--name", "y1")
    text = f"{tmp}/small.txt"
    refused("--shard-tokens 1", text, "--out", OUT, "--name", "d", "--shard-tokens", 1)
    refused("--val-tokens 1", text, "--out", OUT, "--name", "d", "--val-tokens", 1)
    refused("--workers 0", text, "--out", OUT, "--name", "d", "--workers", 0)
    refused("without a folder", text, "--out", OUT, "--name", "x/d")
    refused("--vocab goes with", text, "--out", OUT, "--name", "d", "--vocab", "x", "y")
    refused("--name NAME is needed", text)
    refused("no such file and no such set; the sets: tinyshakespeare", "tinyshakespear")
    refused("none.txt: No such file", f"{tmp}/none.txt", "--out", OUT, "--name", "d")
    refused("is a folder", tmp, "--out", OUT, "--name", "d")
    refused("its SHA-256 is", text, "--out", OUT, "--name", "d", "--sha256", "0" * 64)
    made(text, "--out", OUT, "--name", "sum", "--val-tokens", 2, "--sha256",
         hashlib.sha256(read(text)).hexdigest())
    refused("needs the package tiktoken", text, "--out", OUT, "--name", "d", "--tokenizer", "gpt2",
            PYTHONPATH=f"{tmp}/none")
    refused("needs the program zstd", write("p.txt.zst", b""), "--out", OUT, "--name", "d2", PATH=f"{tmp}")


def test_parquet():
    try:
        import pyarrow, pyarrow.parquet
    except ImportError:
        print("parquet: pyarrow is not installed: only the message that says so is tested")
        refused("pip install pyarrow", write("p.parquet", b"PAR1"), "--out", OUT, "--name", "p")
        return
    print("parquet: tested with pyarrow")
    docs = [f"document {i}\n" for i in range(1000)]
    table = pyarrow.table({"text": docs + [None, ""], "n": list(range(1002))})
    pyarrow.parquet.write_table(table, f"{tmp}/p.parquet", row_group_size=100)
    made(f"{tmp}/p.parquet", "--out", OUT, "--name", "p", "--val-tokens", 0)
    check(bytes(whole("p")) == "".join("\n" + d for d in docs).encode(), "parquet: the column")
    refused("no column 'story' of strings; there is: text, n", f"{tmp}/p.parquet", "--out", OUT, "--name",
            "p2", "--field", "story")
    refused("p3.parquet: ", write("p3.parquet", read(f"{tmp}/p.parquet")[:-9]), "--out", OUT, "--name", "p3")


# ---- stopped and gone on -----------------------------------------------------------------------------------
def killed_at(args, number):
    """prepare.py, which is killed before its rename of that number. Its exit status, -9 then."""
    sys.stdout.flush()  # or the child says it once more
    child = os.fork()
    if child == 0:
        calls, real = [0], os.replace

        def replace(a, b):
            calls[0] += 1
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            real(a, b)
        os.replace = replace
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        in_child("prepare.py", [*map(str, args)])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_kill_at_each_rename():
    docs = [f"{i} " + "word " * (i * 7 % 23) for i in range(60)]
    paths = [write(f"k{j}.jsonl", "\n".join(json.dumps({"text": d}) for d in docs[j::2])) for j in (0, 1)]
    want = None
    for size, nval in ((400, None), (1500, None), (5000, None), (300, 700), (400, 0)):
        args = [*paths, "--name", "k", "--shard-tokens", size]
        args += [] if nval is None else ["--val-tokens", nval]
        made(*args, "--out", f"{tmp}/whole")
        kept = [0]
        want, at, status = {f: read(f"{tmp}/whole/{f}") for f in os.listdir(f"{tmp}/whole")}, 0, -9
        while status == -9:
            at += 1
            status = killed_at([*args, "--out", f"{tmp}/killed"], at)
            said = made(*args, "--out", f"{tmp}/killed")
            kept += [int(said.split()[3])] if said.startswith("going on after") else []
            got = {f: read(f"{tmp}/killed/{f}") for f in os.listdir(f"{tmp}/killed")}
            check(got == want, f"shards of {size}, killed at rename {at}: {sorted(got)}")
            shutil.rmtree(f"{tmp}/killed")
        check(status == 0 and at >= len(want), f"{at} renames")
        # all but the tokenizer, the record, and the last, which was not full
        check(max(kept) == len(want) - 3 or size == 5000, f"complete shards were kept: {kept}")
        shutil.rmtree(f"{tmp}/whole")


def test_kill_workers():
    rng = random.Random(2)
    texts = (" ".join(rng.choice(["king", "sees", "the", "fool's", "\n\n", "1605."]) for _ in range(20))
             for _ in range(12000))
    path = write("w.jsonl", "\n".join(json.dumps({"text": t}) for t in texts))
    args = [path, "--name", "w", "--tokenizer", "gpt2", "--shard-tokens", 12000]
    made(*args, "--out", f"{tmp}/one", "--workers", 1)
    want = {f: read(f"{tmp}/one/{f}") for f in os.listdir(f"{tmp}/one") if f.endswith(".bin")}
    check(len(want) > 10, f"{sorted(want)}")
    out, kills = f"{tmp}/three", 0
    for complete in (1, 6, 99):
        process = subprocess.Popen([sys.executable, "data/prepare.py", *map(str, args), "--out", out,
                                    "--workers", "3"], env=ENV, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                if json.loads(read(f"{out}/w.json"))["complete"] >= complete:
                    process.kill()
                    kills += 1
                    break
            time.sleep(0.005)
        status = process.wait()
    check(status == 0 and kills >= 1, f"killed {kills} times")
    got = {f: read(f"{out}/{f}") for f in os.listdir(out) if f.endswith(".bin")}
    check(got == want, f"killed, and with three workers: {sorted(got)}")
    deadline = time.monotonic() + 5
    while workers() and time.monotonic() < deadline:
        time.sleep(0.02)
    left = workers()
    check(not left, f"no worker outlives a run that was killed: {left}")
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)

    # a worker that is killed
    process = subprocess.Popen([sys.executable, "data/prepare.py", *map(str, args), "--out", f"{tmp}/dead",
                                "--workers", "2"], env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True)
    children = []
    while process.poll() is None and not children:
        with contextlib.suppress(OSError):
            all_children = read(f"/proc/{process.pid}/task/{process.pid}/children").decode().split()
            children = [c for c in all_children if "spawn_main" in read(f"/proc/{c}/cmdline").decode()]
    os.kill(int(children[0]), signal.SIGKILL)
    _, err = process.communicate()
    check(process.returncode == 1 and "a worker process was killed" in err, err)


def workers():
    """Processes that this test has started, and theirs."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"DATA_TEST={tmp}".encode() in read(f"/proc/{pid}/environ"):
                found.append(pid)
    return found


def peak(*args):
    """The run's largest memory in MB (a child's ru_maxrss would count this process's), and what it said."""
    code = ("import runpy, sys; sys.path.insert(0, 'data'); sys.argv[0] = 'prepare.py'\n"
            "try: runpy.run_path('data/prepare.py', run_name='__main__')\n"
            "finally: print([l for l in open('/proc/self/status') if 'VmHWM' in l][0].split()[1])")
    result = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True,
                            env=ENV)
    return int(result.stdout.split()[-1]) / 1024, result.stderr


def test_memory():
    line = json.dumps({"text": "The king sees the fool. " * 40})
    most = {}
    for size, kind in ((4, "jsonl"), (32, "jsonl"), (16, "json")):
        path = f"{tmp}/m.{kind}"
        with open(path, "w") as f:
            f.write("[" if kind == "json" else "")
            for _ in range(size):
                f.write(f"{line}\n" * 1000 if kind == "jsonl" else f"{line},\n" * 1000)
            f.write(f"{line}]" if kind == "json" else "")
        most[size], said = peak(path, "--out", f"{tmp}/m{size}", "--name", "m", "--shard-tokens", 10_000_000)
        check(said == "", said)
        shutil.rmtree(f"{tmp}/m{size}")
    check(max(most[32], most[16]) < most[4] + 8, f"peak memory of 4, 32 and, JSON, 16 MB: {most}")
    bomb = gzip.compress(b"a" * 30_000_000, 1) * 10
    for name, says, limit in (("bomb.txt.gz", "no space and no line end", 200),
                              ("bomb.jsonl.gz", "longer than", 250),
                              ("bomb.json.gz", "is not a JSON array", 60)):
        got, said = peak(write(name, bomb), "--out", OUT, "--name", "bomb", "--tokenizer", "gpt2",
                         "--workers", 1, "--force")
        check(says in said and got < limit, f"{name}: {got:.0f} MB, {said}")


# ---- downloads ---------------------------------------------------------------------------------------------
class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files; server.plans[path] is a list of faults, one for each request, then it behaves."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, headers, body=b""):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def do_GET(self):
        server = self.server
        path = self.path
        server.asked.append((path, dict(self.headers)))
        plan = server.plans.get(path, [])
        fault = plan.pop(0) if plan else "none"
        data = server.files.get(path)
        self.close_connection = True
        if isinstance(fault, int):
            return self.answer(fault, {"Content-Length": "0", "Retry-After": "0"})
        if data is None:
            return self.answer(404, {"Content-Length": "0"})
        if isinstance(data, dict):  # headers of a redirect, or of a page of a list
            return self.answer(data["status"], {"Content-Length": str(len(data["body"])), **data["headers"]},
                               data["body"])
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        headers = {"Content-Type": "application/octet-stream", "ETag": etag}
        start, status = 0, 200
        span = self.headers.get("Range")
        if span and fault != "no range" and self.headers.get("If-Range", etag) == etag:
            start, status = int(span[6:-1]), 206
            if start >= len(data):
                return self.answer(416, {"Content-Length": "0"})
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if fault == "endless":
            self.answer(200, {"Content-Type": "application/octet-stream"})
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b"x" * 65536)
            return
        if fault == "web page":
            headers["Content-Type"], body = "text/html; charset=utf-8", b"<html>log in</html>"
        if fault == "hidden page":
            body = b"\n<!DOCTYPE html><html>log in</html>"
        if fault == "weak":  # cut short, too
            headers["ETag"] = 'W/"1"'
        if fault == "wrong range":
            headers["Content-Range"] = f"bytes 0-{len(data) - 1}/{len(data)}"
        headers["Content-Length"] = str(len(body))
        if fault in ("cut", "stall", "weak"):
            self.answer(status, headers, body[:len(body) // 2])
            with contextlib.suppress(OSError):
                self.wfile.flush()
                time.sleep(2 if fault == "stall" else 0)
            return
        self.answer(status, headers, body)


def serve():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.files, server.plans, server.asked = {}, {}, []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


def get(server, faults=(), path="/f.bin", data=None, keep=False, token=None, timeout=30, **known):
    """Downloads from the server; says what went wrong, or None. Counts the requests."""
    target = f"{tmp}/get/f.bin"
    if not keep:
        shutil.rmtree(f"{tmp}/get", ignore_errors=True)
        os.makedirs(f"{tmp}/get")
    server.files.setdefault(path, BLOB)
    if data is not None:
        server.files[path] = data
    server.plans[path], server.asked[:] = list(faults), []
    client = fetch.Client(timeout=timeout, retries=3, wait=0.01, hub=server.url, token=token)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            fetch.fetch(client, server.url + path, target, **known)
    except UserError as e:
        check(str(e).count("\n") == 0 and not os.path.exists(target), f"{faults}: no file after: {e}")
        return str(e)
    check(read(target) == (BLOB if data is None or isinstance(data, dict) else data), f"{faults}: bytes")
    check(os.listdir(f"{tmp}/get") == ["f.bin"], f"{faults}: no other file is left")
    return None


def ranges(server):
    return [headers.get("Range") for _, headers in server.asked]


def test_faults():
    server = serve()
    size, sha = len(BLOB), hashlib.sha256(BLOB).hexdigest()
    check(get(server) is None and len(server.asked) == 1, "a download")
    check(get(server, keep=True, size=size) is None and not server.asked, "it is there: nothing is asked for")
    check("is of" in get_there(server, size + 1), "what is there is of another size")
    check(get(server, [500, 503, 429]) is None and len(server.asked) == 4, "500, 503, 429, then well")
    check("500" in (get(server, [500] * 9) or "") and len(server.asked) == 4, "500 for ever")
    check("404" in (get(server, [404]) or "") and len(server.asked) == 1, "404")
    check("HF_TOKEN" in (get(server, [401]) or "") and len(server.asked) == 1, "401")
    check(get(server, ["cut", "cut"]) is None, "cut short")
    half = size // 2
    check(ranges(server) == [None, f"bytes={half}-", f"bytes={half + (size - half) // 2}-"], "ranges")
    check(get(server, ["stall"], timeout=0.5) is None and ranges(server)[:2] == [None, f"bytes={half}-"],
          "stalled")
    check(get(server, ["weak"]) is None and ranges(server) == [None, None], "a weak ETag is no promise")
    check(get(server, ["cut", "no range"]) is None, "no range support: from the beginning")
    check(get(server, ["cut", "wrong range"]) is None and ranges(server)[2] is None, "another range")
    check("web page" in (get(server, ["web page"]) or "") and len(server.asked) == 1, "a web page")
    check("web page" in (get(server, ["hidden page"]) or ""), "a web page that is called data")
    check("web page" in (get(server, ["cut", "web page"]) or ""), "a web page instead of the rest")
    check("doesn't say how long" in (get(server, ["endless"]) or ""), "endless, of unknown length")
    check("more than" in (get(server, ["endless"], size=size) or ""), "endless, of known length")
    check(f"{size + 1} expected" in (get(server, size=size + 1) or ""), "another length than listed")
    check("SHA-256" in (get(server, size=size, sha256="0" * 64) or ""), "another SHA-256")
    check(get(server, size=size, sha256=sha) is None, "the SHA-256")
    check("gave up" in (get(server, ["cut"] * 9) or "") and os.path.exists(f"{tmp}/get/f.bin.part"), "kept")
    check(get(server, keep=True) is None and ranges(server) != [None], "and gone on with by the next run")
    get(server, ["cut"] * 9)
    check(get(server, keep=True, data=BLOB[::-1]) is None and len(server.asked) == 1, "changed: all anew")
    server.files["/f.bin"] = BLOB
    get(server, ["cut"] * 9)
    with open(f"{tmp}/get/f.bin.part", "r+b") as f:
        f.write(b"damage")
    check(get(server, keep=True, sha256=sha) is None and ranges(server)[-1] is None, "damaged: all anew")
    get(server, ["cut"] * 9)
    with open(f"{tmp}/get/f.bin.part", "ab") as f:
        f.write(bytes(2 * size))
    check(get(server, keep=True) is None, "a part longer than the whole")

    # the hub sends on to another host, which must not see the token
    other = serve()
    other.files["/cdn"] = BLOB
    redirect = {"status": 302, "body": b"", "headers": {
        "Location": other.url + "/cdn", "X-Linked-Size": str(size), "X-Linked-Etag": f'"{sha}"'}}
    check(get(server, path="/r", data=redirect, token="secret") is None, "a redirect")
    check(server.asked[0][1].get("Authorization") == "Bearer secret" and
          "Authorization" not in other.asked[0][1], "the token stays with the hub")
    redirect["headers"]["X-Linked-Etag"] = '"' + "0" * 64 + '"'
    check("SHA-256" in (get(server, path="/r", data=redirect) or ""), "the hub's SHA-256 is checked")
    loop = {"status": 302, "body": b"", "headers": {"Location": server.url + "/loop"}}
    check(get(server, path="/loop", data=loop) is not None, "a redirect to itself")
    check("want a URL that begins" in fetch_error("file:///etc/passwd"), "no files by URL")
    check("gave up" in fetch_error("http://127.0.0.1:9/x"), "nobody listens")
    for s in (server, other):
        s.shutdown()


def get_there(server, size):
    try:
        fetch.fetch(fetch.Client(), server.url + "/f.bin", f"{tmp}/get/f.bin", size=size)
    except UserError as e:
        return str(e)
    return ""


def fetch_error(url):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            fetch.fetch(fetch.Client(timeout=30, retries=1, wait=0), url, f"{tmp}/get/none")
    except UserError as e:
        return str(e)
    return ""


def test_sets():
    server = serve()
    base = ["--base-url", server.url, "--retry-wait", "0"]

    def page(url, entries, after=None):
        body = json.dumps(entries).encode()
        headers = {"Link": f'<https://huggingface.co{after}>; rel="next"'} if after else {}
        server.files[url] = {"status": 200, "body": body, "headers": headers}

    # token shards that others have made, listed on two pages, one of which fails at first
    made_shards = {f"fineweb_{'train' if i else 'val'}_{i:06d}.bin": tokens.header(50, 2) + bytes([i, 0]) * 50
                   for i in range(4)}
    entries = [{"type": "file", "path": name, "size": len(data), "oid": "x",
                "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}}
               for name, data in made_shards.items()]
    tree = "/api/datasets/kjj0/fineweb10B-gpt2/tree/main"
    page(tree, entries[1:] + [{"type": "directory", "path": "x.bin", "size": 0}], tree + "?cursor=2")
    page(tree + "?cursor=2", [entries[0], {"type": "file", "path": "README.md", "size": 3}])
    for name, data in made_shards.items():
        server.files[f"/datasets/kjj0/fineweb10B-gpt2/resolve/main/{name}"] = data
    server.plans[tree] = [500]
    out = f"{tmp}/fineweb"
    said = made("fineweb10B-gpt2", "--out", out, "--files", 2, *base)
    check("train: 100 tokens in 2 shards\nval: 50 tokens in 1 shard" in said, said)
    check({f: read(f"{out}/{f}") for f in os.listdir(out) if f.endswith(".bin")} ==
          {f: d for f, d in made_shards.items() if "3.bin" not in f}, "shards: two to train, one to validate")
    entries[1]["size"] += 1
    page(tree, entries)
    refused("expected", "fineweb10B-gpt2", "--out", f"{tmp}/f2", *base)
    page(tree, [{**entries[0], "path": "../../.bashrc.bin"}])
    refused("strange name", "fineweb10B-gpt2", "--out", f"{tmp}/f3", *base)
    page(tree, {"error": "x"})
    refused("not the hub's list", "fineweb10B-gpt2", "--out", f"{tmp}/f3", *base)
    server.files[tree] = b"<html>"
    server.plans[tree] = ["web page"]
    refused("web page", "fineweb10B-gpt2", "--out", f"{tmp}/f3", *base)
    page(tree, entries)
    bad = tokens.header(51, 2) + bytes(100)
    server.files["/datasets/kjj0/fineweb10B-gpt2/resolve/main/fineweb_val_000000.bin"] = bad
    page(tree, [{**entries[0], "lfs": {"oid": hashlib.sha256(bad).hexdigest()}, "size": len(bad)}])
    refused("is not a whole token shard", "fineweb10B-gpt2", "--out", f"{tmp}/f4", *base)

    # TinyStories: a tar of JSON arrays
    stories = tar_of([(f"data{i:02d}.json", json.dumps([{"story": f"\n story {i} {j}\n"} for j in range(50)])
                       .encode()) for i in range(3)])
    where = "/datasets/roneneldan/TinyStories/resolve/main/TinyStories_all_data.tar.gz"
    server.files[where] = stories
    page("/api/datasets/roneneldan/TinyStories/tree/main",
         [{"type": "file", "path": "TinyStories_all_data.tar.gz", "size": len(stories)},
          {"type": "file", "path": "TinyStories-train.txt", "size": 5}])
    server.plans[where] = ["cut", 500]
    out = f"{tmp}/stories"
    made("tinystories", "--out", out, "--tokenizer", "byte", "--val-tokens", 100, "--delete-downloads",
         HF_ENDPOINT=server.url)
    want = "".join(f"\nstory {i} {j}" for i in range(3) for j in range(50))
    check(bytes(whole("TinyStories", out)) == want.encode(), "TinyStories")
    check(not os.listdir(f"{out}/download"), "--delete-downloads")

    # tiny Shakespeare is known to the byte
    server.files["/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"] = bytes(1115394)
    refused("its SHA-256 is", "tinyshakespeare", "--out", f"{tmp}/tiny", *base)
    server.files["/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"] = b"short"
    refused("is of 5 bytes, 1115394 expected", "tinyshakespeare", "--out", f"{tmp}/tiny", *base)
    # a branch of the hub with a slash in its name; parquet is only downloaded here
    branch, part = "refs%2Fconvert%2Fparquet", "plain_text/train"
    page(f"/api/datasets/Skylion007/openwebtext/tree/{branch}/{part}",
         [{"type": "file", "path": f"{part}/000{i}.parquet", "size": 4} for i in range(3)])
    for i in range(3):
        server.files[f"/datasets/Skylion007/openwebtext/resolve/{branch}/{part}/000{i}.parquet"] = b"PAR1"
    said = made("openwebtext", "--out", f"{tmp}/owt", "--download-only", "--files", 2, *base)
    check(sorted(os.listdir(f"{tmp}/owt/download")) == ["0000.parquet", "0001.parquet"], said)
    for name in ("fineweb10B", "fineweb100B", "edu_fineweb10B", "edu_fineweb100B"):
        place = f"HuggingFaceFW/fineweb{'-edu' * ('edu' in name)}"
        part = "sample/100BT" if "100" in name else "sample/10BT"
        page(f"/api/datasets/{place}/tree/main/{part}",
             [{"type": "file", "path": f"{part}/0.parquet", "size": 4}])
        server.files[f"/datasets/{place}/resolve/main/{part}/0.parquet"] = b"PAR1"
        made(name, "--out", f"{tmp}/{name}", "--download-only", *base)
        check(os.listdir(f"{tmp}/{name}/download") == ["0.parquet"], name)
    # files that are downloaded while the one before is read
    for i in range(3):
        server.files[f"/part{i}.jsonl"] = f'{{"text": "part {i}"}}\n'.encode() * 3
    urls = [f"{server.url}/part{i}.jsonl" for i in range(3)]
    server.plans["/part1.jsonl"] = ["cut", 500]
    made(*urls, "--out", f"{tmp}/parts", "--name", "p", "--val-tokens", 0, "--retry-wait", 0)
    check(bytes(whole("p", f"{tmp}/parts")) == b"".join(b"\npart %d" % i * 3 for i in range(3)), "three URLs")
    server.plans["/part2.jsonl"] = [404]
    refused("404", *urls, "--out", f"{tmp}/parts2", "--name", "p", "--val-tokens", 0)
    server.asked.clear()
    made(*urls, "--out", f"{tmp}/parts2", "--name", "p", "--val-tokens", 0)
    check([p for p, _ in server.asked] == ["/part2.jsonl"], "what is there is not downloaded again")
    # a URL as a file
    server.files["/my/text.txt"] = b"hello there, king"
    url = server.url + "/my/text.txt?download=true"
    server.files["/my/text.txt?download=true"] = b"hello there, king"
    made(url, "--out", f"{tmp}/url", "--name", "u", "--val-tokens", 5, "--sha256",
         hashlib.sha256(b"hello there, king").hexdigest())
    check(bytes(whole("u", f"{tmp}/url")) == b"hello there, king", "a URL")
    lock = subprocess.Popen([sys.executable, "-c", "import fcntl, os, sys\n"
                             "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
                             "print(flush=True); input()", OUT], stdin=-1, stdout=-1)
    lock.stdout.readline()
    refused("another run is at work", f"{tmp}/docs.txt", "--out", OUT, "--name", "l")
    lock.communicate(b"\n")
    server.shutdown()


# ---- HellaSwag ---------------------------------------------------------------------------------------------
def test_hellaswag():
    examples = [{"ind": 24 + i, "ctx": f"A man number {i} is sitting", "label": i % 4,
                 "endings": [f"on a roof{'!' * j} {i}" for j in range(4)]} for i in range(7)]
    path = write("h.jsonl", "\n".join(map(json.dumps, examples)))

    def expected(encode):
        body, longest = b"", 0
        for i, e in enumerate(examples):
            parts = [encode(e["ctx"])] + [encode(" " + x) for x in e["endings"]]
            n = 2 * (5 + sum(1 + len(p) for p in parts))
            body += struct.pack("<5H", 65535, n, i, e["label"], 4)
            for p in parts:
                body += struct.pack(f"<H{len(p)}H", len(p), *p)
            longest = max(longest, n)
        return struct.pack("<4i", 20240522, 1, len(examples), longest) + bytes(1008) + body
    for name, encode in (("byte", str.encode), ("gpt2", words)):
        result = run(path, "--out", f"{tmp}/h", "--tokenizer", name, program="hellaswag.py")
        check(result.returncode == 0 and "7 examples" in result.stdout, result.stderr)
        check(read(f"{tmp}/h/hellaswag_val.bin") == expected(encode), f"hellaswag_val.bin: {name}")
    server = serve()
    server.files["/rowanz/hellaswag/master/data/hellaswag_val.jsonl"] = read(path)
    result = run("--out", f"{tmp}/h2", "--base-url", server.url, program="hellaswag.py")
    check(result.returncode == 0 and read(f"{tmp}/h2/hellaswag_val.bin") == expected(words), "downloaded")
    server.shutdown()
    for says, change in (("four endings", {"endings": ["a"]}), ("a label 0 ... 3", {"label": 4}),
                         ("want ctx", {"ctx": None}), ("can't hold it", {"ctx": "x" * 40000}),
                         ("half of a surrogate pair", {"ctx": "\ud800"})):
        refused(says, write("hb.jsonl", json.dumps({**examples[0], **change})), "--out", OUT, "--tokenizer",
                "byte", program="hellaswag.py")
    refused("want ctx", write("hl.jsonl", "[1, 2]\n"), "--out", OUT, "--tokenizer", "byte", program="hellaswag.py")
    refused("no example", write("he.jsonl", ""), "--out", OUT, "--tokenizer", "byte", program="hellaswag.py")


def test_progress():
    said = io.StringIO()
    report.PLAIN_S = 0.05
    with contextlib.redirect_stderr(said):
        progress = report.Progress("tokens", 4_000_000, 1_000_000)
        progress.at(1_500_000)
        progress.began -= 10
        progress.said -= 1
        progress.at(2_000_000, ", more")
    check(re.fullmatch(r"tokens: 2 MB of 4 MB, (100|99.\d|9\d) KB/s, 0:00:2\d left, more\n", said.getvalue()),
          f"plain: {said.getvalue()!r}")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
    with open(slave, "w") as terminal, contextlib.redirect_stderr(terminal):
        progress = report.Progress("a download of a long name", 100)
        progress.said -= 1
        progress.at(50)
        progress.end()
    said = os.read(master, 1000).decode()
    os.close(master)
    check(said == "\r\033[K[##########          ] a download of a \r\033[K", f"bar, of 39 columns: {said!r}")


def test_shakespeare():
    os.makedirs(f"{tmp}/there")
    for f in ("shakespeare.txt", "shakespeare_train_000001.bin", "shakespeare_val_000000.bin",
              "shakespeare_tokenizer.bin", "SOURCE"):
        write(f"there/{f}", "x")
    result = subprocess.run(["bash", "data/shakespeare.sh", f"{tmp}/there"], capture_output=True, text=True)
    check(result.returncode == 0 and "is there already: x" in result.stdout, "shakespeare.sh: all is there")
    check(len(os.listdir(f"{tmp}/there")) == 5, "shakespeare.sh: nothing is added")


# in memory where that can be: there are thousands of small files, each flushed to disk
with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as tmp:
    OUT = f"{tmp}/out"
    for folder in (OUT, f"{tmp}/stub/tiktoken"):
        os.makedirs(folder)
    write("stub/tiktoken/__init__.py", TIKTOKEN)
    write("stub/tiktoken/load.py", "")
    module = {}
    exec(TIKTOKEN, module)
    ENV = {**os.environ, "PYTHONPATH": f"{tmp}/stub", "no_proxy": "*", "DATA_TEST": tmp,
           "PYTHONDONTWRITEBYTECODE": "1"}
    ENV.pop("HF_ENDPOINT", None)
    os.environ["no_proxy"] = "*"
    BLOB = random.Random(3).randbytes(3_000_001)
    tests = [f for name, f in list(globals().items()) if name.startswith("test_")]
    for test in tests:
        if len(sys.argv) < 2 or test.__name__ in sys.argv[1:]:
            began = time.monotonic()
            test()
            print(f"{test.__name__}: {time.monotonic() - began:.1f} s")

print(f"{passed} passed, {failed} failed")
sys.exit(failed != 0 or passed == 0)
