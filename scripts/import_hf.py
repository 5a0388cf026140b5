#!/usr/bin/python3
"""Turns a Hugging Face folder of a GPT-2 into a model file that train_gpt and llm.c read.

    scripts/import_hf.py gpt2 gpt2_124M_bf16.bin --dtype bf16 --tokenizer-out gpt2_tokenizer.bin
    ./train_gpt -e gpt2_124M_bf16.bin --tokenizer gpt2_tokenizer.bin ...

Reads config.json and model.safetensors (or its shards, by model.safetensors.index.json; or
pytorch_model.bin, for which PyTorch must be installed), and for the tokenizer vocab.json or tokenizer.json.
Rows of zeros pad the vocabulary to a multiple of 128. fp32 becomes bf16 by rounding to nearest, ties to
even. What GPT-2 can be told in config.json and train_gpt does not compute is refused.

Needs numpy alone. Memory is that of the largest tensor, about. Files are renamed from temporary names. It is
export_hf.py's reverse: an export that is imported gives the same bytes. doc/interchange.md tells more.
"""
import argparse
import os
import re
import sys

import numpy as np

import hf_files as hf
from hf_files import FormatError, ck

INDEX, PICKLE = hf.WEIGHTS + ".index.json", "pytorch_model.bin"
SIZES = {"maxT": "n_positions", "V": "vocab_size", "L": "n_layer", "NH": "n_head", "C": "n_embd"}
# option: values under which the model is train_gpt's; what it is where config.json does not say comes first
WANTED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def read_config(folder):
    """-> config as in checkpoint.py, and what config.json says."""
    path = os.path.join(folder, hf.CONFIG)
    said, sizes = hf.read_json(path), {}
    if said.get("model_type") != "gpt2":
        raise FormatError(f"{path}: model_type {said.get('model_type')!r}; 'gpt2' can be read")
    for name, key in SIZES.items():
        sizes[name] = said.get(key)
        if not hf.is_count(sizes[name]) or not 1 <= sizes[name] <= 1 << 30:
            raise FormatError(f"{path}: {key} is {sizes[name]!r}, want a number from 1 to 2^30")
    config = ck.make_config(**sizes)
    width = 4 * config["C"]
    if config["C"] % config["NH"]:
        raise FormatError(f"{path}: n_embd {config['C']} is not a multiple of n_head {config['NH']}")
    if said.get("n_inner") not in (None, width):
        raise FormatError(f"{path}: n_inner {said['n_inner']!r}; want null, or 4 * n_embd = {width}")
    for key, good in WANTED.items():
        value = said.get(key, good[0])
        if value not in good:
            raise FormatError(f"{path}: {key} {value!r} is not what train_gpt computes; want {good[0]!r}")
    return config, said


class Shards:
    """The files that an index names, as one. None may be in another folder."""

    def __init__(self, folder):
        path = os.path.join(folder, INDEX)
        self.place = hf.read_json(path).get("weight_map")
        if not isinstance(self.place, dict) or not all(isinstance(f, str) for f in self.place.values()):
            raise FormatError(f"{path}: has no weight_map of tensors and their files")
        self.files, self.tensors = {}, {}
        for name in sorted(set(self.place.values())):
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
                raise FormatError(f"{path}: {name[:80]!r} is not the name of a file in the folder")
            self.files[name] = hf.Safetensors(os.path.join(folder, name))
        for tensor, name in self.place.items():
            if tensor not in self.files[name].tensors:
                raise FormatError(f"{path}: tensor {tensor[:80]!r} is not in {name}")
            self.tensors[tensor] = self.files[name].tensors[tensor]

    def read(self, tensor):
        return self.files[self.place[tensor]].read(tensor)


class Pickle:
    """pytorch_model.bin: all tensors in memory. Nothing but tensors is unpickled: nothing in it is run."""

    def __init__(self, path):
        try:
            import torch
        except ImportError:
            raise FormatError(f"{path}: needs PyTorch; a folder with {hf.WEIGHTS} does not") from None
        kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
        self.bits = torch.int16
        try:
            self.loaded = torch.load(path, map_location="cpu", weights_only=True)
            self.tensors = {name: (kinds.get(x.dtype, str(x.dtype)), tuple(x.shape))
                            for name, x in self.loaded.items()}
        except Exception as e:  # whatever its unpickler says
            why = " ".join(str(e).split())[:100]
            raise FormatError(f"{path}: is not a file of tensors alone: {why}") from None

    def read(self, name):
        x, dtype = self.loaded[name].contiguous(), self.tensors[name][0]
        return (x.view(self.bits) if dtype == "BF16" else x).numpy().view(hf.DTYPES[dtype])


def open_weights(folder):
    for name in (hf.WEIGHTS, INDEX, PICKLE):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return hf.Safetensors(path) if name == hf.WEIGHTS else (
                Shards(folder) if name == INDEX else Pickle(path))
    raise FormatError(f"{folder}: has no {hf.WEIGHTS}, {INDEX} or {PICKLE}")


def check_weights(folder, weights, config):
    """-> {name of hf.pieces: name in the file}; every tensor is there, of its shape, and no other."""
    prefix = "transformer." if "transformer.wte.weight" in weights.tensors else ""
    names = {name: prefix + name for name, _, _ in hf.pieces(config)}
    for name, shape, _ in hf.pieces(config):
        what = f"{folder}: tensor {names[name]}"
        if names[name] not in weights.tensors:
            raise FormatError(f"{what} is missing")
        dtype, got = weights.tensors[names[name]]
        if got != shape:
            raise FormatError(f"{what} is {list(got)}, but {hf.CONFIG} says {list(shape)}")
        if dtype not in hf.DTYPES:
            raise FormatError(f"{what} is of {dtype}; want one of {', '.join(hf.DTYPES)}")
    # buffers of older versions, which hold no weights
    buffers = {f"{prefix}h.{i}.attn.{b}" for i in range(config["L"]) for b in ("bias", "masked_bias")}
    rest = set(weights.tensors) - set(names.values()) - buffers - {"lm_head.weight"}
    if rest:
        raise FormatError(f"{folder}: tensor {min(rest)[:80]!r} is none of a GPT-2 of {config['L']} layers")
    if "lm_head.weight" in weights.tensors:
        head, wte = "lm_head.weight", names["wte.weight"]
        if weights.tensors[head] != weights.tensors[wte] or not np.array_equal(
                weights.read(head).view(np.uint8), weights.read(wte).view(np.uint8)):
            raise FormatError(f"{folder}: {head} is not {wte}; train_gpt has one tensor for both")
    return names


def read_tokenizer(folder, said, V):
    """-> tokens, end-of-text token"""
    path = os.path.join(folder, "vocab.json")
    if os.path.exists(path):
        vocab = hf.read_json(path)
    else:
        path = os.path.join(folder, "tokenizer.json")
        if not os.path.exists(path):
            raise FormatError(f"{folder}: has no vocab.json or tokenizer.json for --tokenizer-out")
        model = hf.read_json(path).get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(vocab, dict):
            raise FormatError(f"{path}: has no vocabulary of a BPE model")
    tokens = hf.vocab_tokens(path, vocab)
    if len(tokens) > V:
        raise FormatError(f"{path}: {len(tokens)} tokens, but {hf.CONFIG} says {V}")
    for eot in (said.get("eos_token_id"), said.get("bos_token_id"), vocab.get("<|endoftext|>")):
        if hf.is_count(eot) and eot < len(tokens):
            return tokens, eot
    raise FormatError(f"{path}: no token begins a text: {hf.CONFIG} has no eos_token_id or bos_token_id")


def write_model(path, weights, names, config, dtype):
    progress = hf.Progress(ck.num_parameters(config))
    with open(path, "wb") as out:
        out.write(ck.model_header(config, ck.MODEL_FP32 if dtype == "F32" else ck.MODEL_BF16))
        for name, shape, transposed in hf.pieces(config):
            x, have = weights.read(names[name]), weights.tensors[names[name]][0]
            for part in hf.converted(x.T if transposed else x, have, dtype):
                out.write(part)
            progress.add(x.size)
            if name == "wte.weight":
                out.write(bytes(hf.padding(config) * hf.DTYPES[dtype].itemsize))
                progress.add(hf.padding(config))


def import_(args):
    for path in filter(None, (args.out, args.tokenizer_out)):
        if os.path.lexists(path) and not args.force:
            raise FormatError(f"{path} is there: take another name, or --force to replace it")
    config, said = read_config(args.folder)
    tokenizer = read_tokenizer(args.folder, said, config["V"]) if args.tokenizer_out else None
    weights = open_weights(args.folder)
    names = check_weights(args.folder, weights, config)
    found = {weights.tensors[name][0] for name in names.values()}
    dtype = hf.DTYPE_OF[args.dtype] if args.dtype else "BF16" if found == {"BF16"} else "F32"
    tmp = f"{args.out}.tmp"
    try:
        write_model(tmp, weights, names, config, dtype)
        if tokenizer:
            ck.write_tokenizer(args.tokenizer_out, *tokenizer)
        os.replace(tmp, args.out)
    finally:
        if os.path.lexists(tmp):
            os.remove(tmp)
    sizes = ", ".join(f"{k}={config[k]}" for k in ("L", "C", "NH", "V", "maxT"))
    told = f"; {args.tokenizer_out}: {len(tokenizer[0])} tokens" if tokenizer else ""
    print(f"wrote {args.out}: {sizes}, {'fp32' if dtype == 'F32' else 'bf16'}{told}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", metavar="HF_DIR", help="a folder that transformers loads as a GPT-2")
    p.add_argument("out", metavar="OUT.bin", help="the model file")
    p.add_argument("--dtype", choices=("bf16", "fp32"), help="of the file (default: bf16 if all weights are)")
    p.add_argument("--tokenizer-out", metavar="FILE", help="also write a tokenizer file")
    p.add_argument("--force", action="store_true", help="replace files that are there")
    args = p.parse_args()
    try:
        import_(args)
    except FormatError as e:
        sys.exit(f"import_hf.py: {e}")
    except OSError as e:
        sys.exit(f"import_hf.py: {e.filename or 'error'}: {e.strerror}")


if __name__ == "__main__":
    main()
