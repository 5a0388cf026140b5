#!/usr/bin/python3
"""Are scripts/export_hf.py and import_hf.py right? A model that the program trained, and the fixture's, go to a Hugging
Face folder and back: the same bytes. The folder is read here by other code, in Hugging Face's layout, and its forward
pass compared with PyTorch's logits, the program's validation loss and the text that it writes. Then each bad file.

Where transformers is installed it loads the folders, too, and logits, tokens and text are compared; a line says whether
that was done. It need not be this interpreter's:  HF_PYTHON=VENV/bin/python python3 dev/test/hf_test.py
"""

import contextlib, importlib, io, json, math, os, re, resource, shutil, struct, subprocess, sys, traceback

import numpy as np

from program import PROGRAM, Run, check, main, read, succeeds, tmp, train, words, write

sys.path[:0] = [os.path.abspath("dev"), os.path.abspath("scripts")]
sys.dont_write_bytecode = True
import checkpoint as ck

FP32 = "FP32" in PROGRAM
SIZES = "L=2,C=48,NH=4,V=256,maxT=64"
HF_PYTHON = os.environ.get("HF_PYTHON", sys.executable)


# ---- what the scripts say ------------------------------------------------------------------------------------
class Script:
    """A run of a script, as a user starts it."""

    def __init__(self, name, *args, most_file=None, python=sys.executable):
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_file, most_file))) if most_file else None
        p = subprocess.Popen([python, os.path.abspath(f"scripts/{name}"), *map(str, args)], cwd=tmp, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit)
        self.out, self.err = p.stdout.read(), p.stderr.read()
        self.rc, usage = os.wait4(p.pid, 0)[1:]
        p.returncode, self.peak_mib = self.rc, usage.ru_maxrss / 1024
        self.name = " ".join(map(str, (name, *args)))[-300:]


class Call(Script):
    """The same in this process: there are many, and a start of Python takes longer than what they do."""

    def __init__(self, name, *args):
        own, argv, at = importlib.import_module(name[:-3]), sys.argv, os.getcwd()
        out, err, self.rc = io.StringIO(), io.StringIO(), 0
        sys.argv, self.name = [name, *map(str, args)], " ".join(map(str, (name, *args)))[-300:]
        os.chdir(tmp)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                own.main()
            except SystemExit as e:  # Python prints its text
                self.rc = 256 if isinstance(e.code, str) else (e.code or 0) << 8
                err.write(f"{e.code}\n" if isinstance(e.code, str) else "")
            except Exception:
                traceback.print_exc()
        sys.argv, self.out, self.err = argv, out.getvalue(), err.getvalue()
        os.chdir(at)


def done(name, *args, **how):
    run = Script(name, *args, **how)
    check(run.rc == 0 and run.out.startswith("wrote ") and run.out.count("\n") == 1, f"{run.name}: {run.out}{run.err}")
    return run


def everything():
    return sorted(os.path.join(at, name) for at, folders, files in os.walk(tmp) for name in files + folders)


def refuses(says, name, *args, **how):
    """One line on stderr that says all this, and no file, folder or temporary name is left."""
    before, run = everything(), Script(name, *args, **how) if how else Call(name, *args)
    check(run.rc == 256 and run.err.count("\n") == 1 and "Traceback" not in run.err, f"{run.name}: {run.rc} {run.err}")
    for part in says.split("|"):
        check(part in run.err, f"'{part}' is said: {run.name}: {run.err}")
    check(everything() == before, f"nothing is left: {run.name}: {set(everything()) ^ set(before)}")


# ---- a folder, read without the scripts' code ----------------------------------------------------------------
def tensors_of(path):
    """-> {name: float64 array}, {name: bytes as they are}"""
    data = open(path, "rb").read()
    n = struct.unpack_from("<Q", data)[0]
    table, found, raw = json.loads(data[8 : 8 + n]), {}, {}
    table.pop("__metadata__", None)
    for name, t in table.items():
        part = data[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]]
        x = np.frombuffer(part, {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}[t["dtype"]])
        x = (x.astype("<u4") << 16).view("<f4") if t["dtype"] == "BF16" else x
        found[name], raw[name] = x.astype(np.float64).reshape(t["shape"]), part
    return found, raw


def norm(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def logits_of(folder, ids):
    """GPT2LMHeadModel's forward pass. ids: [B, T] -> [B, T, V]"""
    w = tensors_of(f"{tmp}/{folder}/model.safetensors")[0]
    config = json.load(open(f"{tmp}/{folder}/config.json"))
    heads, T = config["n_head"], ids.shape[1]
    get = lambda name: (w[f"transformer.{name}.weight"], w[f"transformer.{name}.bias"])
    linear = lambda x, name: x @ get(name)[0] + get(name)[1]  # Conv1D: [in, out]
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:T]
    for i in range(config["n_layer"]):
        q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(0, 2, 1, 3) for t in
                   np.split(linear(norm(x, *get(f"h.{i}.ln_1")), f"h.{i}.attn.c_attn"), 3, -1))
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1])
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        att = (p / p.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + linear(att, f"h.{i}.attn.c_proj")
        h = linear(norm(x, *get(f"h.{i}.ln_2")), f"h.{i}.mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"h.{i}.mlp.c_proj")
    return norm(x, *get("ln_f")) @ w["transformer.wte.weight"].T


def loss_of(folder, ids, targets):
    z = logits_of(folder, ids)
    z = z - z.max(-1, keepdims=True)
    return float((np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, targets[..., None], -1)[..., 0]).mean())


def fixture():
    shutil.copytree("dev/fixture", f"{tmp}/fixture")


# ---- tests ---------------------------------------------------------------------------------------------------
def models():
    """The fixture's three, and sizes of which Vp == V: there and back; logits as PyTorch's."""
    for name in ("even", "even_bf16", "odd"):
        path = f"fixture/{name}.bin"
        done("export_hf.py", path, f"hf_{name}")
        done("import_hf.py", f"hf_{name}", f"back_{name}.bin")
        check(read(f"back_{name}.bin") == read(path), f"{name}: export then import gives the same bytes")
        config = ck.read_model(f"{tmp}/{path}")[0]
        rows = json.load(open(f"{tmp}/hf_{name}/config.json"))["vocab_size"]
        check(tensors_of(f"{tmp}/hf_{name}/model.safetensors")[0]["transformer.wte.weight"].shape == (rows, config["C"])
              and rows == 67, f"{name}: no padded rows")
    for name in ("even", "odd"):
        config, _ = ck.read_model(f"{tmp}/fixture/{name}.bin")
        state = ck.read_state(f"{tmp}/fixture/{name}_debug_state.bin", config)
        apart = np.abs(logits_of(f"hf_{name}", state["x"]) - state["logits"]).max()
        check(apart < 1e-6 * np.abs(state["logits"]).max(), f"{name}: logits are PyTorch's: {apart}")
    for name in ("even", "even_bf16"):  # rounded by export, by import, or not at all
        done("export_hf.py", f"fixture/{name}.bin", f"narrow_{name}", "--dtype", "bf16")
        check(read(f"narrow_{name}/model.safetensors") == read("hf_even_bf16/model.safetensors"), f"{name} as bf16")
        done("import_hf.py", f"hf_{name}", f"narrow_{name}.bin", "--dtype", "bf16")
        check(read(f"narrow_{name}.bin") == read("fixture/even_bf16.bin"), f"{name} to bf16")
    done("export_hf.py", "fixture/even_bf16.bin", "wide", "--dtype", "fp32")
    wide, narrow = (tensors_of(f"{tmp}/{f}/model.safetensors")[0] for f in ("wide", "hf_even_bf16"))
    check(wide.keys() == narrow.keys() and all(np.array_equal(wide[k], narrow[k]) for k in wide), "bf16 as fp32")
    config = ck.make_config(16, 128, 1, 2, 8)  # nothing is padded
    full = {k: np.random.RandomState(1).uniform(-1, 1, s).astype("<f4") for k, s in ck.tensor_shapes(config).items()}
    ck.write_model(f"{tmp}/full.bin", config, full)
    done("export_hf.py", "full.bin", "hf_full")
    done("import_hf.py", "hf_full", "back_full.bin")
    check(config["Vp"] == 128 and read("full.bin") == read("back_full.bin"), "Vp == V")


def trained():
    """A byte model that the program trains: its validation loss and likeliest text are those of the folder."""
    succeeds(train("-x", 60, "-b", 8, "-t", 32, "-l", "3e-3", "-o", "run", "-v", 60, "-m", 5, model=SIZES))
    run = succeeds(train("-x", 1, "-b", 8, "-t", 32, "-l", 0, "-v", 1, "-m", 5, model="run/model_00000060.bin"))
    said = float(re.search(r"val loss ([\d.]+)", run.out)[1])
    done("export_hf.py", "run/model_00000060.bin", "hf_run", "--tokenizer", "a_tokenizer.bin")
    tokens = ck.read_shard(f"{tmp}/a_val_000000.bin").astype(np.int64)[: 5 * 256 + 1]
    loss = loss_of("hf_run", tokens[:-1].reshape(40, 32), tokens[1:].reshape(40, 32))
    check(abs(loss - said) < (2e-6 if FP32 else 4e-3) and loss < 4.0, f"validation loss {said}, of the folder {loss}")
    done("import_hf.py", "hf_run", "back_run.bin", "--tokenizer-out", "back_tokenizer.bin")
    check(read("back_run.bin") == read("run/model_00000060.bin"), "a trained model there and back")
    check(read("back_tokenizer.bin") == read("a_tokenizer.bin"), "a byte tokenizer there and back")
    run = succeeds(Run("-i", "none*", "-j", "none*", "-e", "back_run.bin", "--tokenizer", "back_tokenizer.bin",
                       "--generate", "--prompt", "The king", "-g", 40, "--temperature", 0))
    text = re.search(r"(?s)---\n(.*?)\n---\n", run.out)[1].encode()
    ids = np.frombuffer(text, np.uint8).astype(np.int64)
    z = logits_of("hf_run", ids[None, :-1])[0]
    short = (z.max(-1) - z[np.arange(len(ids) - 1), ids[1:]])[len("The king") - 1 :]
    check(len(ids) == 40 and short.max() < (1e-4 if FP32 else 0.1), f"likeliest text: {text}: {short}")
    write("run.txt", text)


def pairs_of(text, n):
    """A byte pair encoding of n merges, learnt from the text: tokens in order, and the pairs."""
    parts, tokens, merges = [bytes([b]) for b in text], [bytes([i]) for i in reversed(range(256))], []
    for _ in range(n):
        counts = {}
        for pair in zip(parts, parts[1:]):
            if b" " not in pair[1] and pair[0] + pair[1] not in tokens:
                counts[pair] = counts.get(pair, 0) + 1
        best = max(sorted(counts), key=lambda pair: counts[pair])
        merges.append(best)
        tokens.append(best[0] + best[1])
        joined = []
        for part in parts:
            if joined and (joined[-1], part) == best:
                joined[-1] += part
            else:
                joined.append(part)
        parts = joined
    return tokens, merges


def tokenizers():
    tokens, merges = pairs_of(read("a.txt")[:4000], 60)
    tokens += [b"}~", b"{}", b"{}~", b"<|endoftext|>"]
    merges += [(b"}", b"~"), (b"{", b"}"), (b"{", b"}~")]  # of {, }, ~ the two that merged first, not those in front
    ck.write_tokenizer(f"{tmp}/pairs.bin", tokens, len(tokens) - 1)
    config = ck.make_config(64, 320, 1, 2, 8)
    zeros = {k: np.zeros(s, "<f4") for k, s in ck.tensor_shapes(config).items()}
    ck.write_model(f"{tmp}/pairs_model.bin", config, zeros)
    done("export_hf.py", "pairs_model.bin", "hf_pairs", "--tokenizer", "pairs.bin")
    shown = lambda part: part.replace(b" ", "Ġ".encode()).replace(b"\n", "Ċ".encode()).decode()
    lines = read("hf_pairs/merges.txt").decode().split("\n")
    check(lines == ["#version: 0.2", *(f"{shown(a)} {shown(b)}" for a, b in merges), ""], f"merges: {lines} {merges}")
    vocab = json.loads(read("hf_pairs/vocab.json"))
    check(all(vocab[shown(a + b)] == 256 + i for i, (a, b) in enumerate(merges)), "numbers of merges")
    found = [vocab.get(c) for c in "ĠĀŃ"]
    check(found == [255 - 0x20, 255, 255 - 0xAD], f"characters of a blank, 0 and 0xad: {found}")
    check(len(vocab) == 320 and vocab["<|endoftext|>"] == 319, "all tokens are in vocab.json")
    done("export_hf.py", "pairs_model.bin", "hf_files", "--vocab", "hf_pairs/vocab.json", "--merges",
         "hf_pairs/merges.txt")
    names = sorted(os.listdir(f"{tmp}/hf_pairs"))
    check(len(names) == 7 and names == sorted(os.listdir(f"{tmp}/hf_files")) and
          all(read(f"hf_pairs/{f}") == read(f"hf_files/{f}") for f in names), f"--vocab, --merges: {names}")
    done("import_hf.py", "hf_pairs", "back_pairs.bin", "--tokenizer-out", "back_pairs_tokenizer.bin")
    check(read("back_pairs_tokenizer.bin") == read("pairs.bin"), "a tokenizer there and back")
    shutil.copytree(f"{tmp}/hf_pairs", f"{tmp}/hf_one")  # as later versions of transformers save it
    os.remove(f"{tmp}/hf_one/vocab.json")
    write("hf_one/tokenizer.json", json.dumps({"model": {"vocab": vocab}}).encode())
    done("import_hf.py", "hf_one", "one.bin", "--tokenizer-out", "one_tokenizer.bin")
    check(read("one_tokenizer.bin") == read("pairs.bin"), "tokenizer.json")
    check(read("hf_run/merges.txt") == b"#version: 0.2\n", "bytes have no merges")
    told = json.loads(read("hf_run/config.json"))
    check((told["bos_token_id"], told["eos_token_id"]) == (10, None), "a byte model begins with a newline, never stops")
    told = json.loads(read("hf_pairs/config.json"))
    check((told["bos_token_id"], told["eos_token_id"]) == (319, 319), "others begin and stop with <|endoftext|>")
    odd = {"bytes": tokens[1:], "twice": tokens[:-1] + [tokens[0]], "loose": tokens[:-2] + [b"zqx", tokens[-1]]}
    for name, says in (("bytes", "byte 255 is not a token"), ("twice", "same bytes"), ("loose", "token 318 is not")):
        ck.write_tokenizer(f"{tmp}/{name}.bin", odd[name], len(odd[name]) - 1)
        refuses(f"{name}.bin: |{says}", "export_hf.py", "pairs_model.bin", "no", "--tokenizer", f"{name}.bin")
    refuses("320 tokens, but|V=67", "export_hf.py", "fixture/even.bin", "no", "--tokenizer", "pairs.bin")
    refuses("magic 20240326, but a tokenizer|this is a model", "export_hf.py", "full.bin", "no", "--tokenizer",
            "full.bin")
    refuses("--vocab with --merges", "export_hf.py", "full.bin", "no", "--vocab", "hf_pairs/vocab.json")


def safetensors(path, entries, change=lambda table: None, length=None):
    """entries: {name: (dtype, shape, bytes)}; change alters the header, length replaces its number of bytes."""
    table, at = {}, 0
    for name, (dtype, shape, data) in entries.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    change(table)
    text = table["text"] if "text" in table else json.dumps(table).encode()
    write(path, struct.pack("<Q", len(text) if length is None else length), text, *(e[2] for e in entries.values()))


def even_entries():
    found, raw = tensors_of(f"{tmp}/hf_even/model.safetensors")
    return {name: ("F32", x.shape, raw[name]) for name, x in found.items()}


def folders():
    """What other programs leave: other names, buffers, a head of its own, shards, fp16."""
    entries, want = even_entries(), read("fixture/even.bin")

    def imported(folder, *args):
        write(f"{folder}/config.json", read("hf_even/config.json"))
        done("import_hf.py", folder, f"{folder}.bin", *args)
        return read(f"{folder}.bin")

    os.mkdir(f"{tmp}/hub")
    bare = {name.replace("transformer.", ""): e for name, e in reversed(list(entries.items()))}
    bare["h.0.attn.bias"] = ("U8", (1, 1, 4, 4), bytes(16))
    bare["lm_head.weight"] = bare["wte.weight"]
    safetensors("hub/model.safetensors", bare)
    check(imported("hub") == want, "names as the hub has them, in another order")
    os.mkdir(f"{tmp}/shards")
    names = list(entries)
    for i, part in enumerate((names[:7], names[7:])):
        safetensors(f"shards/part{i}.safetensors", {name: entries[name] for name in part})
    places = {name: f"part{int(i >= 7)}.safetensors" for i, name in enumerate(names)}
    write("shards/model.safetensors.index.json", json.dumps({"weight_map": places}).encode())
    check(imported("shards") == want, "shards")
    places[names[0]] = "../shards/part0.safetensors"
    write("shards/model.safetensors.index.json", json.dumps({"weight_map": places}).encode())
    refuses("'../shards/part0.safetensors' is not the name of a file", "import_hf.py", "shards", "no.bin")
    os.mkdir(f"{tmp}/half")
    half = {n: ("F16", s, np.frombuffer(d, "<f4").astype("<f2").tobytes()) for n, (_, s, d) in entries.items()}
    safetensors("half/model.safetensors", half)
    imported("half")
    found, got = ck.read_model(f"{tmp}/fixture/even.bin")[1], ck.read_model(f"{tmp}/half.bin")[1]
    check(all(np.array_equal(got[n], x.astype("<f2").astype("<f4")) for n, x in found.items()), "fp16")


def bad_models():
    raw = read("fixture/even.bin")
    for says, data in (("starts with a header of 1024", raw[:500]),
                       ("magic 7, but a model has 20240326", words(raw, w0=7)),
                       ("but its header says that the model has 123392", raw[:-1]),
                       ("but its header says that the model has 123392", raw + b"x"),
                       ("version 4", words(raw, w1=4)), ("V=0", words(raw, w3=0)), ("L=-1", words(raw, w4=-1)),
                       ("Vp=66 is smaller than V=67", words(raw, w7=66)), ("not a multiple of NH=5", words(raw, w5=5)),
                       ("its header says", words(raw, w4=2**31 - 1, w5=1, w6=2**31 - 1)),
                       ("this is an optimizer state", words(raw, w0=ck.OPTIMIZER_MAGIC)),
                       ("bytes are swapped", words(raw, w0=int(np.int32(ck.MODEL_MAGIC).byteswap())))):
        write("bad.bin", data)
        refuses(f"bad.bin: |{says}", "export_hf.py", "bad.bin", "no")
    refuses("none.bin: cannot be read: No such file", "export_hf.py", "none.bin", "no")
    refuses("hf_even/model.safetensors is there|--force", "export_hf.py", "fixture/odd.bin", "hf_even")
    done("export_hf.py", "fixture/odd.bin", "hf_pairs", "--force")
    check(sorted(os.listdir(f"{tmp}/hf_pairs")) == ["config.json", "generation_config.json", "model.safetensors"] and
          read("hf_pairs/model.safetensors") == read("hf_odd/model.safetensors"), "--force leaves nothing old")
    refuses("File too large", "export_hf.py", "fixture/odd.bin", "no", most_file=50000)
    old = read("hf_odd/model.safetensors")
    refuses("File too large", "export_hf.py", "fixture/even.bin", "hf_odd", "--force", most_file=50000)
    check(read("hf_odd/model.safetensors") == old, "a failed --force leaves the old model")
    os.makedirs(f"{tmp}/killed/.export-tmp")
    write("killed/.export-tmp/model.safetensors", b"half")
    done("export_hf.py", "fixture/odd.bin", "killed")
    check(len(os.listdir(f"{tmp}/killed")) == 3, "what a killed export has left is removed")
    write("file", b"x")
    refuses("file", "export_hf.py", "fixture/odd.bin", "file")


def bad_folders():
    entries, config = even_entries(), json.loads(read("hf_even/config.json"))
    os.mkdir(f"{tmp}/bad")

    def folder(change=lambda table: None, drop=(), length=None, cut=None, **options):
        kept = {name: e for name, e in entries.items() if name not in drop}
        safetensors("bad/model.safetensors", kept, change, length)
        if cut:
            write("bad/model.safetensors", cut(read("bad/model.safetensors")))
        write("bad/config.json", json.dumps({**config, **options}).encode())

    def refused_import(says, *args, **how):
        folder(*args, **how)
        refuses(f"bad|{says}", "import_hf.py", "bad", "no.bin")

    wpe, wte = "transformer.wpe.weight", "transformer.wte.weight"
    for key, value in (("activation_function", "gelu"), ("scale_attn_by_inverse_layer_idx", True), ("n_inner", 64),
                       ("reorder_and_upcast_attn", True), ("scale_attn_weights", False), ("layer_norm_epsilon", 1e-6),
                       ("tie_word_embeddings", False), ("add_cross_attention", True), ("model_type", "llama"),
                       ("n_head", 5), ("n_layer", 0), ("n_embd", None), ("vocab_size", 1 << 40), ("n_positions", True)):
        refused_import(key, **{key: value})
    refused_import(f"tensor {wte} is [67, 32], but config.json says [68, 32]", vocab_size=68)
    refused_import("tensor transformer.h.2.ln_1.weight is missing", n_layer=3)
    refused_import("'transformer.h.1.", n_layer=1)
    refused_import(f"tensor {wpe} is missing", drop=(wpe,))
    spare = dict(dtype="F32", shape=[0], data_offsets=[0, 0])
    refused_import("'spare' is none of a GPT-2", lambda t: t.update(spare=spare))
    refused_import("want one of F32, BF16, F16", lambda t: t[wpe].update(dtype="F64"))
    refused_import("has bytes 8576 to 12672", lambda t: t[wpe].update(shape=[32, 33]))
    refused_import("overlaps another", lambda t: t[wpe].update(data_offsets=[8572, 12668]))
    refused_import("leaves a gap", lambda t: t[wpe].update(data_offsets=[8580, 12676]))
    refused_import("has no dtype, shape and data_offsets", lambda t: t[wpe].update(data_offsets=[-4, 4092]))
    refused_import("has no dtype, shape and data_offsets", lambda t: t[wpe].update(shape=[32.0, 32]))
    refused_import("has no dtype, shape and data_offsets", lambda t: t.update({wpe: 3}))
    refused_import("but its header says", cut=lambda data: data[:-4])
    refused_import("but its header says", cut=lambda data: data + b"1234")
    refused_import("a header of 1152921504606846976: truncated", length=1 << 60)
    refused_import("truncated", cut=lambda data: data[:5])
    refused_import("is not JSON", lambda t: t.update(text=b"[" * 100000))
    refused_import("is not JSON", lambda t: t.update(text=b'{"a":1,"a":2}'))
    refused_import("is not JSON", lambda t: t.update(text=b"\xff\xfe{}"))
    refused_import("holds a list", lambda t: t.update(text=b"[]"))
    big = b" " * ((1 << 24) + 1)
    refused_import("a header of 16777217 bytes", lambda t: t.update(text=big))
    entries["lm_head.weight"] = ("F32", entries[wte][1], bytes(len(entries[wte][2])))
    refused_import("lm_head.weight is not transformer.wte.weight")
    del entries["lm_head.weight"]
    folder()
    write("bad/config.json", b"{")
    refuses("bad/config.json: is not JSON", "import_hf.py", "bad", "no.bin")
    refuses("File too large", "import_hf.py", "hf_even", "no.bin", most_file=50000)
    refuses("full.bin is there|--force", "import_hf.py", "hf_even", "full.bin")
    refuses("no vocab.json or tokenizer.json", "import_hf.py", "hf_even", "no.bin", "--tokenizer-out", "no_bytes.bin")
    os.remove(f"{tmp}/bad/model.safetensors")
    write("bad/config.json", read("hf_even/config.json"))
    refuses("bad: has no model.safetensors", "import_hf.py", "bad", "no.bin")
    refuses("nowhere/config.json: No such file", "import_hf.py", "nowhere", "no.bin")


def memory():
    """32 layers of 1.6 MiB each: what is held at a time is one tensor, and what converts it."""
    config = ck.make_config(64, 256, 32, 2, 184)
    nbytes = ck.HEADER_NBYTES + 4 * ck.num_parameters(config)
    with open(f"{tmp}/large.bin", "wb") as f:
        f.write(ck.model_header(config, ck.MODEL_FP32))
        f.truncate(nbytes)
    idle = done("export_hf.py", "full.bin", "hf_idle").peak_mib
    there = done("export_hf.py", "large.bin", "hf_large").peak_mib
    back = done("import_hf.py", "hf_large", "large_back.bin").peak_mib
    check(max(there, back) < idle + 12 and nbytes > 48 << 20, f"peak {idle:.0f}, then {there:.0f} and {back:.0f} MiB")
    with open(f"{tmp}/large.bin", "rb") as a, open(f"{tmp}/large_back.bin", "rb") as b:
        check(a.read() == b.read(), "the large one is the same")


# ---- transformers --------------------------------------------------------------------------------------------
COMPARE = r"""
import json, sys
try:
    import transformers, torch
except ImportError as e:
    print(json.dumps({"missing": str(e)}))
    sys.exit()
from transformers import AutoModelForCausalLM, AutoTokenizer
out = {"version": f"{transformers.__version__} with torch {torch.__version__}"}
for folder, ids, text in json.load(sys.stdin):
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        found = {"logits": model(torch.tensor(ids)).logits.double().numpy().tolist()}
        if text:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            found["ids"] = tokenizer(text).input_ids
            found["text"] = tokenizer.decode(found["ids"])
            prompt = torch.tensor([found["ids"][:8]])
            found["next"] = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
            torch.save(model.state_dict(), "pickle/pytorch_model.bin")
            torch.save({"wte.weight": print}, "run/pytorch_model.bin")
    out[folder] = found
print(json.dumps(out))
"""


def transformers_loads():
    text = read("run.txt").decode()
    odd = " don't\n\n\tstop  Ünïcödé 中文 Ċ 12,3 <|endoftext|>\n"
    cases = {f"hf_{name}": (np.random.RandomState(2).randint(0, 67, (2, 24)), None)
             for name in ("even", "odd", "even_bf16")}
    cases["hf_run"] = (np.frombuffer(text.encode(), np.uint8)[None].astype(int), text + odd)
    cases["hf_full"] = (np.arange(16)[None], None)
    asked = json.dumps([(f"{tmp}/{f}", ids.tolist(), text) for f, (ids, text) in cases.items()])
    os.mkdir(f"{tmp}/pickle")
    write("pickle/config.json", read("hf_run/config.json"))
    write("run/config.json", read("hf_run/config.json"))
    p = subprocess.run([HF_PYTHON, "-c", COMPARE], input=asked, capture_output=True, text=True, cwd=tmp)
    check(p.returncode == 0, f"{HF_PYTHON}: {p.stderr[-500:]}")
    got = json.loads(p.stdout.splitlines()[-1]) if p.returncode == 0 else {"missing": "it failed"}
    if "missing" in got:
        print(f"transformers: NOT compared, {HF_PYTHON} has none ({got['missing']}); HF_PYTHON=... names one that has")
        return
    print(f"transformers: compared, {got['version']}")
    for folder, (ids, text) in cases.items():
        found, want = got[f"{tmp}/{folder}"], logits_of(folder, ids)
        apart = np.abs(np.array(found["logits"]) - want).max() / np.abs(want).max()
        check(apart < 2e-5, f"{folder}: logits of transformers are {apart} apart")
        if text:
            check(found["ids"] == list(text.encode()) and found["text"] == text, f"{folder}: tokens: {found}")
            check(found["next"][: 8] == ids[0, :8].tolist(), f"{folder}: it goes on from the prompt")
            z = logits_of(folder, np.array([found["next"][:-1]]))[0]
            short = z.max(-1)[7:] - z[np.arange(7, 15), found["next"][8:]]
            check(len(found["next"]) == 16 and short.max() < 1e-4, f"{folder}: likeliest tokens: {short}")
    done("import_hf.py", "pickle", "pickle.bin", "--dtype", "fp32" if FP32 else "bf16", python=HF_PYTHON)
    check(read("pickle.bin") == read("run/model_00000060.bin"), "pytorch_model.bin")
    refuses("run/pytorch_model.bin: is not a file of tensors alone", "import_hf.py", "run", "no.bin", python=HF_PYTHON)


if __name__ == "__main__":
    main([models, trained, tokenizers, folders, bad_models, bad_folders, memory, transformers_loads], fixture)
