#!/usr/bin/env python3
"""Makes token shards and a tokenizer file of texts: what train_gpt reads (doc/data.md, doc/formats.md).

    data/prepare.py FILE... --name NAME     text, .jsonl, .json, .parquet, .tar, .zip, packed or not; URLs
    data/prepare.py SET                     a named set of data; downloads it (--list names them)

Files are DIR/NAME_val_000000.bin, DIR/NAME_train_000001.bin ... and DIR/NAME_tokenizer.bin. DIR/NAME.json
says what they are made of and how far that is: when a run was stopped, the same command goes on, and ends in
the same bytes.
"""
import argparse
import fcntl
import itertools
import json
import os
import re
import struct
import sys
import threading
import urllib.parse

import fetch
from readers import SEPARATOR, Source
from report import Progress, UserError, amount, save
from tokens import Shards, batches, tokenize, tokenizer, write_tokenizer

GITHUB = "https://raw.githubusercontent.com"


def hub(dataset, folder, name, tokens, nbytes, **more):
    return {"hub": dataset, "folder": folder, "ending": ".parquet", "name": name, "tokens": tokens,
            "bytes": nbytes, **more}


# tokens and bytes of the download are about; what is exact is checked
SETS = {
    "tinyshakespeare": {
        "path": "karpathy/char-rnn/master/data/tinyshakespeare/input.txt", "name": "tiny_shakespeare",
        "size": 1115394, "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "tokens": 338_028, "bytes": 1_115_394, "val": 32768, "separator": "\n\n", "kept": True},
    "tinystories": hub("roneneldan/TinyStories", "", "TinyStories", 945e6, 1.6e9, val=20_000_000,
                       ending="TinyStories_all_data.tar.gz", field="story", strip=True),
    "openwebtext": hub("Skylion007/openwebtext", "plain_text/train", "openwebtext", 9.04e9, 24e9,
                       revision="refs/convert/parquet"),
    "fineweb10B": hub("HuggingFaceFW/fineweb", "sample/10BT", "fineweb", 10.3e9, 27.6e9),
    "fineweb100B": hub("HuggingFaceFW/fineweb", "sample/100BT", "fineweb", 103e9, 277e9),
    "edu_fineweb10B": hub("HuggingFaceFW/fineweb-edu", "sample/10BT", "edu_fineweb", 9.95e9, 28e9),
    "edu_fineweb100B": hub("HuggingFaceFW/fineweb-edu", "sample/100BT", "edu_fineweb", 100e9, 280e9),
    # token shards that others have made
    "fineweb10B-gpt2": hub("kjj0/fineweb10B-gpt2", "", "fineweb", 10.3e9, 20.6e9, ending=".bin"),
    "fineweb100B-gpt2": hub("kjj0/fineweb100B-gpt2", "", "fineweb", 103e9, 206e9, ending=".bin"),
    "edu_fineweb10B-gpt2": hub("kjj0/finewebedu10B-gpt2", "", "finewebedu", 9.95e9, 19.9e9, ending=".bin"),
    "edu_fineweb100B-gpt2": hub("karpathy/fineweb-edu-100B-gpt2-token-shards", "", "edu_fineweb", 100e9,
                                200e9, ending=".bin"),
}


def inputs_of(args, client):
    """What is to be read: dicts of a name and either a path or a url; size and sha256 where known."""
    if args.set:
        if "path" in args.set:
            url = f"{args.base_url or GITHUB}/{args.set['path']}"
            return [{"name": os.path.basename(url), "url": url, "size": args.set["size"],
                     "sha256": args.set["sha256"]}]
        files = fetch.hub_files(client, args.set["hub"], args.set["folder"], args.set["ending"],
                                args.set.get("revision", "main"))
        if args.shards_only:  # the first is to validate, and always wanted
            files.sort(key=lambda f: ("_val_" not in f["name"], f["name"]))
        return files[:args.files and args.files + args.shards_only]
    return [local_input(f, args.sha256) for f in args.what]


def local_input(f, sha256):
    if f.startswith(("http://", "https://")):
        name = os.path.basename(urllib.parse.unquote(urllib.parse.urlsplit(f).path))
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise UserError(f"{f}: want a URL that ends in the name of a file")
        return {"name": name, "url": f, "size": None, "sha256": sha256}
    stat = os.stat(f)
    if os.path.isdir(f):
        raise UserError(f"{f} is a folder: name the files in it")
    if sha256 and (found := fetch.sha256_of(f)) != sha256:
        raise UserError(f"{f}: its SHA-256 is {found}, {sha256} expected")
    return {"name": os.path.basename(f), "path": f, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


class Job:
    """One run, or what is left of one. state stands in DIR/NAME.json:

    asked     what decides about the bytes: inputs and options
    inputs    as inputs_of returns them
    complete  shards before this one are full
    position  where the tokens of shard `complete` begin: input, piece of it, token of that piece
    done      all is there
    """

    def __init__(self, args):
        self.args = args
        self.path = os.path.join(args.out, f"{args.name}.json")
        server = args.base_url or os.environ.get("HF_ENDPOINT") or fetch.HUB
        self.client = fetch.Client(args.timeout, args.retries, args.retry_wait, server,
                                   os.environ.get("HF_TOKEN"))
        self.ntok = self.read = self.nbytes = 0
        self.progress = self.source = None
        for f in args.what:
            if os.path.exists(f) and os.path.exists(self.path) and os.path.samefile(f, self.path):
                raise UserError(f"{f} would be overwritten by this run's record: take another --name")
        self.state = None if args.force else self.load()
        # a set's list of files is asked for once: it may change
        listed = args.set and self.state
        inputs = self.state["inputs"] if listed else inputs_of(args, self.client)
        for f in self.mine() if args.force else []:
            os.remove(os.path.join(args.out, f))
        # shards that were got by other means are as good as downloads
        left = [f for f in self.mine() if not f.startswith(".") and not args.shards_only]
        if self.state is None and left:
            raise UserError(f"{os.path.join(args.out, left[0])} is of an earlier run: --force replaces it, "
                            f"or take another --name")
        files = args.files if args.set else [{k: i[k] for k in i if k != "path"} for i in inputs]
        asked = {"set": args.set and args.what[0], "files": files, "field": args.field,
                 "tokenizer": args.tokenizer, "shard_tokens": args.shard_tokens,
                 "val_tokens": args.val_tokens, "uint32": args.uint32}
        if self.state is None:
            self.state = {"asked": asked, "position": [0, 0, 0], "complete": 1 if args.val_tokens == 0 else 0,
                          "done": False}
        elif self.state["asked"] != asked:
            what = [k for k in asked if asked[k] != self.state["asked"].get(k)]
            raise UserError(f"{self.path} is of a run with other {' and '.join(what)}: --force starts over, "
                            f"or take another --name")
        self.save(inputs=inputs)

    def load(self):
        try:
            with open(self.path, encoding="utf-8") as f:
                state = json.load(f)
            if not {"asked", "inputs", "position", "complete", "done"} <= state.keys() or \
                    not isinstance(state["asked"], dict):
                raise ValueError
            return state
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError):
            raise UserError(f"{self.path} is no record of a run: remove it, or take another --name") from None

    def save(self, **new):
        self.state.update(new)
        save(self.path, lambda f: f.write(json.dumps(self.state, indent=1).encode() + b"\n"))

    def mine(self):
        """The files of this name that a run has made."""
        name = re.escape(self.args.name)
        shard = re.compile(rf"({name}_(train|val)|\.{name})_\d{{6,}}\.bin(\.tmp)?")
        other = [f"{self.args.name}.json", f"{self.args.name}_tokenizer.bin"]
        return [f for f in sorted(os.listdir(self.args.out)) if shard.fullmatch(f) or f in other]

    def downloads(self):
        return self.args.out if self.args.shards_only else os.path.join(self.args.out, "download")

    def local(self, i, quiet=False):
        """The path of input i, which is downloaded if it must be."""
        entry = self.state["inputs"][i]
        if "path" in entry:
            return entry["path"]
        path = os.path.join(self.downloads(), entry["name"])
        fetch.fetch(self.client, entry["url"], path, entry["size"], entry["sha256"], quiet)
        return path

    def ahead(self, i):
        """Downloads input i in the background. Returns a function that waits for it and returns its path."""
        result = []

        def work():
            try:
                result.append(self.local(i, quiet=True))
            except Exception as e:
                result.append(e)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def wait():
            thread.join()
            if isinstance(result[0], Exception):
                raise result[0]
            return result[0]
        return wait

    def forget(self, before):
        """Removes the downloads of inputs that no shard needs any more."""
        if self.args.delete_downloads:
            for entry in self.state["inputs"][:before]:
                path = os.path.join(self.downloads(), entry["name"])
                if "url" in entry and os.path.exists(path):
                    os.remove(path)

    def batches(self, tokens):
        """(tag, batch) of all that is still to be done; tag: the input and the number of the first piece."""
        first, piece, _ = self.state["position"]
        how = self.args.set or {}
        sizes = [entry["size"] or 0 for entry in self.state["inputs"]]
        for i in range(first, len(sizes)):
            path = self.local(i) if i == first else after()
            if i + 1 < len(sizes):
                after = self.ahead(i + 1)
            self.source = Source(path, self.args.field, self.args.tokenizer == "byte",
                                 how.get("separator", SEPARATOR), how.get("kept", False),
                                 how.get("strip", False))
            sizes[i] = self.source.nbytes
            self.read, self.nbytes = sum(sizes[:i]), sum(sizes)
            self.progress = self.progress or Progress("tokens", self.nbytes, self.read)
            self.progress.total = self.nbytes
            for batch in batches(itertools.islice(tokens.pieces(self.source), piece, None)):
                yield (i, piece), batch
                piece += len(batch)
            if self.source.passed_over:
                print(f"{self.source.path}: {self.source.passed_over} files of other kinds passed over")
            piece = 0

    def add(self, shards, tag, packed, counts, used):
        """A batch's tokens to the shards. used: tokens of the first piece that are in earlier shards."""
        (i, piece), width, view = tag, shards.width, memoryview(packed)
        if used == 0 and len(packed) // width < shards.room():
            return shards.add(packed)
        at = 0
        for count in counts:
            while used < count:
                n = min(count - used, shards.room())
                shards.add(view[(at + used) * width:(at + used + n) * width])
                used += n
                if shards.room() == 0:
                    shards.close()
                    self.save(complete=shards.complete, position=[i, piece, used])
                    if shards.complete - 2 >= shards.first:
                        shards.publish(shards.complete - 2)
                    self.forget(i)
            at, piece, used = at + count, piece + 1, 0

    def run(self):
        args = self.args
        width = 4 if args.uint32 else 2
        tokens = tokenizer(args.tokenizer, args.vocab)
        shards = Shards(args.out, args.name, width, args.shard_tokens, args.val_tokens,
                        self.state["complete"])
        used = self.state["position"][2]
        if shards.complete > shards.first:
            print(f"going on after {shards.complete - shards.first} complete shards", flush=True)
        for tag, packed, counts in tokenize(self.batches(tokens), tokens, args.tokenizer, args.vocab, width,
                                            args.workers):
            self.add(shards, tag, packed, counts, used)
            used = 0
            self.ntok += len(packed) // width
            self.progress.at(self.read + self.source.done(), f", {self.ntok / 1e6:.1f} M tokens")
        if self.progress:
            self.progress.end()
        shards.finish(" ".join(args.what)[:200])
        write_tokenizer(os.path.join(args.out, f"{args.name}_tokenizer.bin"), tokens)
        self.save(done=True, complete=shards.complete)
        shards.clean()
        self.forget(None)

    def get_shards(self):
        """A set that is made of token shards."""
        for i in range(len(self.state["inputs"])):
            check_shard(self.local(i))
        self.save(done=True)


def check_shard(path):
    """The number of tokens of a shard whose length is what its header says."""
    with open(path, "rb") as f:
        raw = f.read(1024)
    head = struct.unpack("<256i", raw) if len(raw) == 1024 else [0] * 3
    width = {(20240520, 1): 2, (20240801, 7): 4}.get(tuple(head[:2]))
    if not width or os.path.getsize(path) != 1024 + head[2] * width:
        raise UserError(f"{path} is not a whole token shard; remove it, and the same command gets it again")
    return head[2]


def summary(args, job):
    for split in ("train", "val"):
        shards = [f for f in job.mine() if f.startswith(f"{args.name}_{split}_")]
        if args.shards_only:
            shards = [i["name"] for i in job.state["inputs"] if f"_{split}_" in i["name"]]
        ntok = sum(check_shard(os.path.join(args.out, f)) for f in shards)
        print(f"{split}: {ntok} tokens in {len(shards)} shard{'s' * (len(shards) != 1)}")


def prepare(args):
    os.makedirs(args.out, exist_ok=True)
    folder = os.open(args.out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another run is at work in {args.out}") from None
    except OSError:
        pass  # a file system without locks
    job = Job(args)
    if args.download_only:
        for i in range(len(job.state["inputs"])):
            job.local(i)
        print(f"{len(job.state['inputs'])} files are in {job.downloads()}")
        return
    where = os.path.join(args.out, args.name)
    said = f"wrote {where}_{{train,val}}_*.bin"
    if job.state["done"]:
        said = f"{where}_* is there already"
    elif args.shards_only:
        job.get_shards()
    else:
        job.run()
        said += f" and {where}_tokenizer.bin"
    summary(args, job)
    print(said)


def show_sets():
    print(f"{'set':22} {'tokens':>10} {'download':>9}  from")
    for name, s in SETS.items():
        source = s.get("hub") or s["path"]
        folder = s.get("folder", "")
        print(f"{name:22} {s['tokens'] / 1e6:9,.1f}M {amount(s['bytes']):>9}  {source} {folder}".rstrip())


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="*", metavar="SET | FILE", help="a named set, or files and URLs")
    p.add_argument("--list", action="store_true", help="name the sets")
    p.add_argument("--out", metavar="DIR", help="where the files go; made if missing (default data/NAME)")
    p.add_argument("--name", help="how files' names begin (default for a set: as llm.c calls it)")
    p.add_argument("--tokenizer", choices=("byte", "gpt2"), help="default: gpt2 for a set, else byte")
    p.add_argument("--vocab", nargs=2, metavar=("VOCAB.BPE", "ENCODER.JSON"),
                   help="GPT-2's two vocabulary files, where tiktoken can't download them")
    p.add_argument("--field", help="the field or column of .jsonl, .json, .parquet to take (default text)")
    p.add_argument("--val-tokens", type=int, metavar="N", help="the first N tokens are to validate, 0 for "
                   "none (default: a shard; a tenth of all if all is less than two shards)")
    p.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                   help="at most N tokens a shard (default 100 million)")
    p.add_argument("--uint32", action="store_true", help="4 bytes a token (magic 20240801, version 7), not 2")
    p.add_argument("--workers", type=int, metavar="N", help="processes that make tokens; the bytes do not "
                   "depend on it (default: one a core for gpt2, 1 for byte)")
    p.add_argument("--files", type=int, metavar="N", help="only the first N files of a set; of token shards, "
                   "N to train")
    p.add_argument("--sha256", metavar="HEX", help="what the one FILE must have")
    p.add_argument("--download-only", action="store_true", help="download what is needed, make no tokens")
    p.add_argument("--delete-downloads", action="store_true", help="remove each when it is in shards")
    p.add_argument("--base-url", metavar="URL", help="take a set from this server (HF_ENDPOINT: the hub's)")
    p.add_argument("--timeout", type=float, default=60, metavar="S", help="the server may be silent for S "
                   "seconds (default 60)")
    p.add_argument("--retries", type=int, default=6, metavar="N", help="times to try again (default 6)")
    p.add_argument("--retry-wait", type=float, default=1, metavar="S", help="before the first; then twice as "
                   "long each time, at most a minute (default 1)")
    p.add_argument("--force", action="store_true", help="replace the shards of this name that are there")
    return p.parse_args()


def check(args):
    args.set = SETS.get(args.what[0]) if len(args.what) == 1 else None
    if not args.what:
        raise UserError("name a set or files; --list shows the sets, --help the options")
    for f in args.what if not args.set else []:
        if "/" not in f and "." not in f and not os.path.exists(f):
            raise UserError(f"{f}: no such file and no such set; the sets: {', '.join(SETS)}")
    if not args.set and not args.name:
        raise UserError("--name NAME is needed: files will be NAME_train_000001.bin and so on")
    given = args.set or {}
    args.shards_only = given.get("ending") == ".bin"
    args.out = args.out or os.path.join("data", args.what[0] if args.set else args.name)
    args.name = args.name or given["name"]
    args.tokenizer = args.tokenizer or ("gpt2" if args.set else "byte")
    args.field = args.field or given.get("field", "text")
    if args.val_tokens is None:
        args.val_tokens = given.get("val")
    args.base_url = args.base_url and args.base_url.rstrip("/")
    if args.workers is None:
        args.workers = 1 if args.tokenizer == "byte" else len(os.sched_getaffinity(0))
    if not 2 <= args.shard_tokens < 1 << 31:
        raise UserError(f"--shard-tokens {args.shard_tokens}: want 2 ... {(1 << 31) - 1}")
    if args.val_tokens is not None and not (args.val_tokens == 0 or 2 <= args.val_tokens < 1 << 31):
        raise UserError(f"--val-tokens {args.val_tokens}: want 0, or 2 ... {(1 << 31) - 1}")
    for name, least in (("workers", 1), ("files", 1), ("retries", 0), ("retry_wait", 0), ("timeout", 0.001)):
        value = getattr(args, name)
        if value is not None and not least <= value < 1e6:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: want at least {least:g}")
    if args.vocab and args.tokenizer != "gpt2":
        raise UserError("--vocab goes with --tokenizer gpt2")
    if args.shards_only and args.name != given["name"]:
        raise UserError(f"--name {args.name}: this set's shards are named {given['name']}")
    if not args.name or "/" in args.name:
        raise UserError(f"--name '{args.name}': want the beginning of a file's name, without a folder")
    if args.sha256 and (args.set or len(args.what) > 1 or not re.fullmatch("[0-9a-f]{64}", args.sha256)):
        raise UserError("--sha256: want 64 digits 0-9a-f, and one FILE")
    if args.files and not given.get("hub"):
        raise UserError("--files goes with a set of several files")
    return args


def main():
    try:
        args = options()
        if args.list:
            return show_sets()
        prepare(check(args))
    except UserError as e:
        sys.exit(f"prepare.py: {e}")
    except OSError as e:
        sys.exit(f"prepare.py: {e.filename or 'error'}: {e.strerror or e}")
    except KeyboardInterrupt:
        sys.exit("prepare.py: stopped; the same command goes on")


if __name__ == "__main__":
    main()
