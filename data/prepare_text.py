#!/usr/bin/env python3
"""Makes token shards and a tokenizer file of a text: what train_gpt reads (formats: doc/formats.md).

byte  one token a byte, 256 in all; needs nothing but Python 3.9. The end-of-text token, from which sampling
      starts, is the newline: a token that the text holds, so that the model knows what follows it.
gpt2  GPT-2's byte pair encoding by the package tiktoken. Each document, and the text's beginning, is
      preceded by token 50256; documents are separated by <|endoftext|> in the text.

The last part of the text is for validation. Files are renamed from temporary names when all are done.
"""
import argparse
import array
import codecs
import os
import shutil
import struct
import sys
import tempfile

BLOCK = 1 << 22  # bytes read at once
SEPARATOR = b"<|endoftext|>"
GPT2_EOT = 50256
# how GPT-2 cuts text into words before it merges bytes: part of the definition of its tokens
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class UserError(Exception):
    pass


def read_utf8(path):
    """Yields the file's bytes in blocks, and checks that they are UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with open(path, "rb") as f:
        while True:
            block = f.read(BLOCK)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as e:
                at = done - pending + e.start
                raise UserError(f"{path} is not UTF-8: byte 0x{e.object[e.start]:02x} at position {at}; "
                                f"convert it first, e.g. with iconv") from None
            if not block:
                return
            done += len(block)
            yield block


def documents(blocks):
    """The parts between separators, as text. Empty ones are left out."""
    rest = b""
    for block in blocks:
        start = max(0, len(rest) - len(SEPARATOR) + 1)
        rest += block
        if rest.find(SEPARATOR, start) >= 0:
            *whole, rest = rest.split(SEPARATOR)
            yield from (d.decode() for d in whole if d)
    if rest:
        yield rest.decode()


class ByteTokens:
    vocab, eot = 256, ord("\n")

    def encode(self, path):
        yield from read_utf8(path)

    def token(self, i):
        return bytes([i])


class Gpt2Tokens:
    vocab, eot = 50257, GPT2_EOT

    def __init__(self, files):
        try:
            import tiktoken
            import tiktoken.load
        except ImportError:
            raise UserError("--tokenizer gpt2 needs the package tiktoken: pip install tiktoken, "
                            "or use --tokenizer byte") from None
        try:
            if files is None:
                self.bpe = tiktoken.get_encoding("gpt2")
            else:
                for f in files:
                    open(f, "rb").close()
                ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(*files)
                self.bpe = tiktoken.Encoding("gpt2", pat_str=GPT2_WORDS, mergeable_ranks=ranks,
                                             special_tokens={SEPARATOR.decode(): GPT2_EOT},
                                             explicit_n_vocab=self.vocab)
        except Exception as e:  # tiktoken lets through whatever its download or its parser raised
            where = "from " + " ".join(files or ["the network (or: --vocab VOCAB.BPE ENCODER.JSON)"])
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            raise UserError(f"can't get GPT-2's vocabulary {where}: {reason[:200]}") from None

    def encode(self, path):
        for text in documents(read_utf8(path)):
            yield [GPT2_EOT] + self.bpe.encode_ordinary(text)

    def token(self, i):
        return self.bpe.decode_single_token_bytes(i)


def pack(tokens, width):
    """Tokens as little endian numbers of 2 or 4 bytes."""
    packed = array.array("I" if width == 4 else "H")
    packed.extend(tokens)  # not by the constructor, which takes bytes as packed numbers already
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def write_tokenizer(path, tokens):
    with open(path, "wb") as f:
        f.write(struct.pack("<256I", 20240328, 2, tokens.vocab, tokens.eot, *[0] * 252))
        for i in range(tokens.vocab):
            piece = tokens.token(i)
            f.write(bytes([len(piece)]) + piece)


def cut(n, most):
    """n tokens in as few parts of at most `most` as there can be, all about equal: none is too short."""
    parts = -(-n // most)
    return [(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def write_shard(path, flat, begin, end, width):
    magic, version = (20240520, 1) if width == 2 else (20240801, 7)
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", magic, version, end - begin, *[0] * 253))
        flat.seek(begin * width)
        left = (end - begin) * width
        while left:
            block = flat.read(min(left, BLOCK))
            if not block:
                raise UserError(f"the temporary file {flat.name} has become shorter")
            f.write(block)
            left -= len(block)


def stale(out, name, split, nshards):
    """A shard of an earlier, longer run, which a glob would mix with the new ones."""
    for f in sorted(os.listdir(out)):
        number = f[len(name) + len(split) + 2:-4]
        if f == f"{name}_{split}_{number}.bin" and number.isdigit() and int(number) >= nshards:
            return os.path.join(out, f)
    return None


def prepare(args, tmp):
    tokens = ByteTokens() if args.tokenizer == "byte" else Gpt2Tokens(args.vocab)
    width = 4 if args.uint32 else 2
    ntok = 0
    with open(os.path.join(tmp, "flat"), "w+b") as flat:
        for piece in tokens.encode(args.input):
            pack(piece, width).tofile(flat)
            ntok += len(piece)
        nval = int(ntok * args.val_fraction)
        if ntok - nval < 2 or (args.val_fraction > 0 and nval < 2):
            raise UserError(f"{args.input} makes {ntok} tokens; --val-fraction {args.val_fraction:g} cuts it "
                            f"into {ntok - nval} to train and {nval} to validate: at least 2 each are needed")
        files = []
        for split, begin, end in (("train", 0, ntok - nval), ("val", ntok - nval, ntok)):
            parts = cut(end - begin, args.shard_tokens)
            old = stale(args.out, args.name, split, len(parts))
            if old:
                raise UserError(f"{old} is left from an earlier run and would be mixed with the {len(parts)} "
                                f"new {split} shards: remove it, or take another --name")
            for i, (b, e) in enumerate(parts):
                files.append(f"{args.name}_{split}_{i:06d}.bin")
                write_shard(os.path.join(tmp, files[-1]), flat, begin + b, begin + e, width)
            print(f"{split}: {end - begin} tokens in {len(parts)} shard{'s' * (len(parts) != 1)}")
    files.append(f"{args.name}_tokenizer.bin")
    write_tokenizer(os.path.join(tmp, files[-1]), tokens)
    for f in files:
        os.replace(os.path.join(tmp, f), os.path.join(args.out, f))
    where = os.path.join(args.out, args.name)
    print(f"wrote {where}_{{train,val}}_*.bin and {where}_tokenizer.bin, vocabulary {tokens.vocab}")


def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("input", metavar="INPUT.txt", help="the text, in UTF-8")
    p.add_argument("--out", required=True, metavar="DIR", help="where the files go; made if missing")
    p.add_argument("--name", required=True, help="files are NAME_train_000000.bin, NAME_val_000000.bin, "
                   "NAME_tokenizer.bin")
    p.add_argument("--tokenizer", choices=("byte", "gpt2"), default="byte")
    p.add_argument("--vocab", nargs=2, metavar=("VOCAB.BPE", "ENCODER.JSON"),
                   help="GPT-2's two vocabulary files, where tiktoken can't download them")
    p.add_argument("--val-fraction", type=float, default=0.1, metavar="F", help="0 <= F < 1 (default 0.1)")
    p.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                   help="at most N tokens a shard (default 100 million)")
    p.add_argument("--uint32", action="store_true", help="4 bytes a token (magic 20240801, version 7), not 2")
    args = p.parse_args()
    if not 0 <= args.val_fraction < 1:
        raise UserError(f"--val-fraction {args.val_fraction:g}: want 0 <= F < 1")
    if not 2 <= args.shard_tokens < 1 << 31:
        raise UserError(f"--shard-tokens {args.shard_tokens}: want 2 ... {(1 << 31) - 1}")
    if args.vocab and args.tokenizer != "gpt2":
        raise UserError("--vocab goes with --tokenizer gpt2")
    if not args.name or "/" in args.name:
        raise UserError(f"--name '{args.name}': want the beginning of a file's name, without a folder")
    return args


def main():
    tmp = None
    try:
        args = options()
        os.makedirs(args.out, exist_ok=True)
        tmp = tempfile.mkdtemp(prefix=".prepare-", dir=args.out)
        prepare(args, tmp)
    except UserError as e:
        sys.exit(f"prepare_text.py: {e}")
    except OSError as e:
        sys.exit(f"prepare_text.py: {e.filename or 'error'}: {e.strerror}")
    finally:
        if tmp:
            shutil.rmtree(tmp, ignore_errors=True)


if __name__ == "__main__":
    main()
