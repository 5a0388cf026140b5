#!/usr/bin/python3
"""Turns a model file of train_gpt or llm.c into a folder that Hugging Face's transformers loads as a GPT-2.

    scripts/export_hf.py out/model_00019552.bin hf --tokenizer data/book/book_tokenizer.bin
    python3 -c 'from transformers import pipeline; print(pipeline("text-generation", "hf")("The king"))'

Writes model.safetensors (one file, of any size), config.json, generation_config.json and, with a
tokenizer, vocab.json, merges.txt, tokenizer_config.json, special_tokens_map.json. Rows of wte that pad the
vocabulary are left out. The merges of a tokenizer file are derived from its tokens; transformers cuts text
into words as GPT-2 does, so that a tokenizer with other rules has other tokens there. The byte tokenizer of
data/prepare.py has no token that ends a text: the model is told the newline to begin from, none to stop at.

Needs numpy alone. Memory is that of the largest tensor, about. Files are renamed from temporary names when
all are done, config.json last. import_hf.py does the reverse; doc/interchange.md tells more.
"""
import argparse
import math
import os
import shutil
import sys

import hf_files as hf
from hf_files import FormatError, ck

TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
FILES = (hf.WEIGHTS, "generation_config.json", *TOKENIZER_FILES, hf.CONFIG)  # in the order of appearance


class Tokenizer:
    """vocab, merges: the two files' bytes. V tokens; eot: the one that begins a text; special: its text, or
    None where it is a byte like any other."""

    def __init__(self, path, tokens, eot, vocab, merges):
        self.path, self.V, self.eot, self.vocab, self.merges = path, len(tokens), eot, vocab, merges
        self.special = tokens[eot].decode("ascii", "replace") if len(tokens[eot]) > 1 else None
        if self.special and not all("!" <= c <= "~" for c in self.special):
            raise FormatError(f"{path}: end-of-text token {eot} is not of printable ASCII: {tokens[eot]}")


def tokenizer_of_bin(path):
    tokens, eot = ck.read_tokenizer(path)
    merges = hf.merges_of(path, tokens, eot if len(tokens[eot]) > 1 else -1)
    lines = ["#version: 0.2", *(f"{hf.to_characters(a)} {hf.to_characters(b)}" for a, b in merges), ""]
    vocab = hf.to_json({hf.to_characters(t): i for i, t in enumerate(tokens)})
    return Tokenizer(path, tokens, eot, vocab, "\n".join(lines).encode())


def tokenizer_of_json(vocab_path, merges_path):
    vocab = hf.read_json(vocab_path)
    tokens = hf.vocab_tokens(vocab_path, vocab)
    eot = vocab.get("<|endoftext|>")
    if eot is None:
        raise FormatError(f"{vocab_path}: has no token <|endoftext|>")
    with open(merges_path, "rb") as f:
        merges = f.read(hf.MOST_JSON)
    for i, line in enumerate(merges.decode("utf-8", "replace").splitlines()):
        pair = line.split(" ")
        if not line.startswith("#version") and (len(pair) != 2 or "".join(pair) not in vocab):
            raise FormatError(f"{merges_path}: line {i + 1} is not two parts of a token of {vocab_path}")
    return Tokenizer(vocab_path, tokens, eot, hf.to_json(vocab), merges)


def small_files(config, dtype, tokenizer):
    """{name: bytes} of all but the weights."""
    begin = tokenizer.eot if tokenizer else None
    end = begin if tokenizer and tokenizer.special else None
    model = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype],
        "vocab_size": config["V"],
        "n_positions": config["maxT"],
        "n_ctx": config["maxT"],
        "n_embd": config["C"],
        "n_layer": config["L"],
        "n_head": config["NH"],
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": begin,
        "eos_token_id": end,
    }
    files = {hf.CONFIG: hf.to_json(model)}
    files["generation_config.json"] = hf.to_json({"bos_token_id": begin, "eos_token_id": end})
    if tokenizer:
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokenizer.special)
        settings = {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": config["maxT"],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            **special,
        }
        files["vocab.json"], files["merges.txt"] = tokenizer.vocab, tokenizer.merges
        files["tokenizer_config.json"] = hf.to_json(settings)
        files["special_tokens_map.json"] = hf.to_json(special if tokenizer.special else {})
    return files


def write_weights(path, source, config, have, want):
    """have, want: dtypes of the model file and of the new one."""
    at = ck.HEADER_NBYTES
    progress = hf.Progress(ck.num_parameters(config))
    names = [(f"transformer.{name}", want, shape) for name, shape, _ in hf.pieces(config)]
    with open(source, "rb") as f, open(path, "wb") as out:
        out.write(hf.safetensors_header(names))
        for name, shape, transposed in hf.pieces(config):
            nelem = math.prod(shape)
            x = hf.read_elements(f, at, have, nelem, source)
            for part in hf.converted(x.reshape(shape[::-1]).T if transposed else x, have, want):
                out.write(part)
            nelem += hf.padding(config) if name == "wte.weight" else 0
            at += hf.DTYPES[have].itemsize * nelem
            progress.add(nelem)


def export(args):
    config, version = ck.read_model_header(args.model)
    have = "F32" if version == ck.MODEL_FP32 else "BF16"
    want = hf.DTYPE_OF[args.dtype] if args.dtype else have
    tokenizer = None
    if args.tokenizer:
        tokenizer = tokenizer_of_bin(args.tokenizer)
    elif args.vocab:
        tokenizer = tokenizer_of_json(args.vocab, args.merges)
    if tokenizer and tokenizer.V > config["V"]:
        raise FormatError(f"{tokenizer.path}: {tokenizer.V} tokens, but {args.model} has V={config['V']}")
    there = [name for name in FILES if os.path.lexists(os.path.join(args.out, name))]
    if there and not args.force:
        old = os.path.join(args.out, there[0])
        raise FormatError(f"{old} is there: take another folder, or --force to replace the model in it")
    os.makedirs(args.out, exist_ok=True)
    tmp = os.path.join(args.out, ".export-tmp")
    try:
        shutil.rmtree(tmp, ignore_errors=True)  # what a killed run has left
        os.mkdir(tmp)
        files = small_files(config, want, tokenizer)
        for name, text in files.items():
            with open(os.path.join(tmp, name), "wb") as f:
                f.write(text)
        write_weights(os.path.join(tmp, hf.WEIGHTS), args.model, config, have, want)
        for name in reversed(there):  # config.json first: without it the folder is no model
            os.remove(os.path.join(args.out, name))
        for name in FILES:
            if name == hf.WEIGHTS or name in files:
                os.replace(os.path.join(tmp, name), os.path.join(args.out, name))
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        if not os.listdir(args.out):
            os.rmdir(args.out)
    sizes = ", ".join(f"{k}={config[k]}" for k in ("L", "C", "NH", "V", "maxT"))
    told = f"tokenizer of {tokenizer.V} tokens" if tokenizer else "no tokenizer: --tokenizer FILE adds one"
    print(f"wrote {args.out}: {sizes}, {'fp32' if want == 'F32' else 'bf16'}; {told}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", metavar="MODEL.bin", help="a model file, version 3 (fp32) or 5 (bf16)")
    p.add_argument("out", metavar="OUT_DIR", help="the folder; made if missing")
    p.add_argument("--tokenizer", metavar="FILE", help="the tokenizer file of the model's shards")
    p.add_argument("--vocab", metavar="VOCAB.JSON", help="instead: GPT-2's own two files")
    p.add_argument("--merges", metavar="MERGES.TXT")
    p.add_argument("--dtype", choices=("bf16", "fp32"), help="of the weights (default: the model file's)")
    p.add_argument("--force", action="store_true", help="replace what an earlier export has left there")
    args = p.parse_args()
    try:
        if bool(args.vocab) != bool(args.merges) or args.vocab and args.tokenizer:
            raise FormatError("want --tokenizer FILE, or --vocab with --merges, or none of them")
        export(args)
    except FormatError as e:
        sys.exit(f"export_hf.py: {e}")
    except OSError as e:
        sys.exit(f"export_hf.py: {e.filename or 'error'}: {e.strerror}")


if __name__ == "__main__":
    main()
