#!/usr/bin/env python3
"""Makes hellaswag_val.bin, by which train_gpt scores a model (format: doc/formats.md).

    data/hellaswag.py [hellaswag_val.jsonl] [--out DIR]

Without a file it downloads the validation set (10,042 examples, 12 MB) to DIR. Each completion is tokenised
with a space before it.
"""
import argparse
import array
import os
import struct
import sys

import fetch
from readers import json_items
from report import UserError, save
from tokens import tokenizer

URL = "/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SERVER = "https://raw.githubusercontent.com"
START, MOST = 65535, 65535  # the word that begins an example; the largest number that a word holds


def example_words(tokens, item, index, where):
    """An example as uint16 words."""
    item = item if isinstance(item, dict) else {}
    endings, label = item.get("endings"), item.get("label")
    good = isinstance(item.get("ctx"), str) and isinstance(endings, list) and len(endings) == 4
    if not good or not all(isinstance(e, str) for e in endings) or label not in (0, 1, 2, 3):
        raise UserError(f"{where}: want ctx, four endings and a label 0 ... 3 (the test set has no labels)")
    for text in (item["ctx"], *endings):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: half of a surrogate pair, which is no text") from None
    context = tokens.encode(item["ctx"])
    words = [START, 0, index, int(label), len(endings), len(context), *context]
    for ending in endings:
        completion = tokens.encode(" " + ending)
        words += [len(completion), *completion]
    words[1] = 2 * len(words)
    if words[1] > MOST or index > MOST or not context:
        raise UserError(f"{where}: the format can't hold it: {len(context)} tokens of context, {words[1]} "
                        f"bytes; want at least 1, at most {MOST}, and at most {MOST + 1} examples")
    return words


def write_bin(path, examples):
    """examples: lists of words."""
    def write(f):
        f.write(struct.pack("<256i", 20240522, 1, len(examples), 2 * max(map(len, examples)), *[0] * 252))
        for words in examples:
            packed = array.array("H", words)
            if sys.byteorder == "big":
                packed.byteswap()
            f.write(packed.tobytes())
    save(path, write)


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", nargs="?", metavar="FILE.jsonl")
    p.add_argument("--out", default="data/hellaswag", metavar="DIR", help="default data/hellaswag")
    p.add_argument("--tokenizer", choices=("gpt2", "byte"), default="gpt2", help="the model's (default gpt2)")
    p.add_argument("--vocab", nargs=2, metavar=("VOCAB.BPE", "ENCODER.JSON"),
                   help="GPT-2's two vocabulary files, where tiktoken can't download them")
    p.add_argument("--base-url", default=SERVER, metavar="URL", help=f"download from here (default {SERVER})")
    return p.parse_args()


def main():
    try:
        args = options()
        tokens = tokenizer(args.tokenizer, args.vocab)
        os.makedirs(args.out, exist_ok=True)
        path = args.file or os.path.join(args.out, "hellaswag_val.jsonl")
        if not args.file:
            fetch.fetch(fetch.Client(), args.base_url.rstrip("/") + URL, path)
        with open(path, "rb") as f:
            items = enumerate(json_items(f, path))
            examples = [example_words(tokens, item, i, where) for i, (item, where) in items]
        if not examples:
            raise UserError(f"{path}: no example in it")
        target = os.path.join(args.out, "hellaswag_val.bin")
        write_bin(target, examples)
        print(f"{len(examples)} examples, {os.path.getsize(target)} bytes: {target}")
    except UserError as e:
        sys.exit(f"hellaswag.py: {e}")
    except OSError as e:
        sys.exit(f"hellaswag.py: {e.filename or 'error'}: {e.strerror or e}")


if __name__ == "__main__":
    main()
