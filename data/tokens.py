"""Text to tokens by several processes, and tokens to shards (formats: doc/formats.md).

A document comes in pieces (begins, text): begins says that a new document begins here.

byte  one token a byte, 256 in all. The end-of-text token, from which sampling starts, is the newline: a token
      that texts hold, so that the model knows what follows it.
gpt2  GPT-2's byte pair encoding by the package tiktoken. Token 50256 stands before each document.
"""
import array
import collections
import multiprocessing
import os
import re
import signal
import struct
import sys

from report import UserError, save

BLOCK = 1 << 22  # bytes copied at once
SEPARATOR = "<|endoftext|>"
GPT2_EOT = 50256
# how GPT-2 cuts text into words before it merges bytes: part of the definition of its tokens
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# Before such a place one of GPT-2's words ends, whatever stands around it: of several blanks the last one is
# a word, or begins one. So a text cut there has the tokens of the whole.
CUT = re.compile(r"[ \n](?=\S)")
LONGEST_WORD = 1 << 24  # characters without such a place: this is no text
PIECE = 1 << 20         # characters of a piece, about
BATCH_PIECES = 1024     # pieces sent to a worker at once, at most; PIECE characters end a batch, too


class ByteTokens:
    vocab, eot = 256, ord("\n")

    def pieces(self, pieces):
        return pieces

    def encode(self, text):
        return list(text.encode())

    def packed(self, begins, text, width):
        """Tokens of a piece as little endian numbers of 2 or 4 bytes."""
        # Latin 1 is the text whose characters are the bytes; UTF-16 and UTF-32 widen them
        wide = "utf-16-le" if width == 2 else "utf-32-le"
        return (b"\n" * begins + text.encode()).decode("latin-1").encode(wide)

    def token(self, i):
        return bytes([i])


class Gpt2Tokens:
    vocab, eot = 50257, GPT2_EOT

    def __init__(self, files=None):
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
                                             special_tokens={SEPARATOR: GPT2_EOT},
                                             explicit_n_vocab=self.vocab)
        except Exception as e:  # tiktoken lets through whatever its download or its parser raised
            where = "from " + " ".join(files or ["the network (or: --vocab VOCAB.BPE ENCODER.JSON)"])
            reason = " ".join(f"{type(e).__name__}: {e}".split())
            raise UserError(f"can't get GPT-2's vocabulary {where}: {reason[:200]}") from None

    def pieces(self, pieces):
        """The same documents in pieces that have, one by one, the tokens of the whole."""
        rest, first = "", False
        for begins, text in pieces:
            if begins:
                if rest or first:
                    yield first, rest
                rest, first = "", True
            rest += text
            while len(rest) > PIECE:
                cut = CUT.search(rest, PIECE)
                if not cut:
                    if len(rest) > LONGEST_WORD:
                        raise UserError(f"no space and no line end in {len(rest) - PIECE} characters: is "
                                        f"this text? --tokenizer byte would take it")
                    break
                yield first, rest[:cut.start()]
                rest, first = rest[cut.start():], False
        if rest or first:
            yield first, rest

    def encode(self, text):
        return self.bpe.encode_ordinary(text)

    def packed(self, begins, text, width):
        packed = array.array("I" if width == 4 else "H", [GPT2_EOT] * begins)
        packed.extend(self.bpe.encode_ordinary(text))
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()

    def token(self, i):
        return self.bpe.decode_single_token_bytes(i)


def tokenizer(name, vocab):
    return ByteTokens() if name == "byte" else Gpt2Tokens(vocab)


def write_tokenizer(path, tokens):
    def write(f):
        f.write(struct.pack("<256I", 20240328, 2, tokens.vocab, tokens.eot, *[0] * 252))
        for i in range(tokens.vocab):
            piece = tokens.token(i)
            f.write(bytes([len(piece)]) + piece)
    save(path, write)


def batches(pieces):
    """Lists of pieces, large enough that sending them about costs little."""
    batch, length = [], 0
    for piece in pieces:
        batch.append(piece)
        length += len(piece[1])
        if length >= PIECE or len(batch) == BATCH_PIECES:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def encode_batch(tokens, batch, width):
    """The batch's tokens, packed, and how many of them each piece has."""
    packed = [tokens.packed(begins, text, width) for begins, text in batch]
    return b"".join(packed), [len(p) // width for p in packed]


def work(pipe, name, vocab, width):
    """A worker: a batch in, its tokens out, until the other end is closed or gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        tokens = tokenizer(name, vocab)
        while True:
            pipe.send(encode_batch(tokens, pipe.recv(), width))
    except (EOFError, OSError):
        pass
    except Exception as e:
        pipe.send(UserError(f"a worker failed: {type(e).__name__}: {e}"))


def receive(pipe):
    try:
        result = pipe.recv()
    except (EOFError, ConnectionError):
        raise UserError("a worker process was killed: was there memory for --workers? "
                        "The same command goes on") from None
    if isinstance(result, Exception):
        raise result
    return result


def tokenize(tagged, tokens, name, vocab, width, nworkers):
    """Yields (tag, packed, counts) for each (tag, batch), in order. tokens: this process's tokenizer.

    Each worker has one batch at most: nobody writes to a pipe whose reader is writing, and memory is bounded.
    """
    if nworkers == 1:
        for tag, batch in tagged:
            yield tag, *encode_batch(tokens, batch, width)
        return
    context = multiprocessing.get_context("spawn")
    pipes, workers, waiting = [], [], collections.deque()
    try:
        for _ in range(nworkers):
            here, there = context.Pipe()
            worker = context.Process(target=work, args=(there, name, vocab, width), daemon=True)
            worker.start()
            there.close()
            pipes.append(here)
            workers.append(worker)
        for i, (tag, batch) in enumerate(tagged):
            pipe = pipes[i % nworkers]
            if len(waiting) == nworkers:
                before, pipe = waiting.popleft()
                yield before, *receive(pipe)
            try:
                pipe.send(batch)
            except ConnectionError:
                receive(pipe)
            waiting.append((tag, pipe))
        while waiting:
            tag, pipe = waiting.popleft()
            yield tag, *receive(pipe)
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.terminate()
            worker.join()


def cut(n, most):
    """n tokens in as few parts of at most `most` as there can be, all about equal: none is too short."""
    parts = -(-n // most)
    return [(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def header(ntok, width):
    magic, version = (20240520, 1) if width == 2 else (20240801, 7)
    return struct.pack("<256i", magic, version, ntok, *[0] * 253)


class Shards:
    """Cuts a stream of tokens into NAME_val_000000.bin, NAME_train_000001.bin, ...

    Shard i is a hidden file until it is known how it ends: it gets its name when the next one is full, too.
    The last two are shared out evenly, so that none is too short to be read. val: tokens of shard 0, 0 for
    none; None for a full one or, where all is less than two shards, a tenth of all.
    """

    def __init__(self, out, name, width, most, val, complete):
        self.out, self.name, self.width, self.most, self.val = out, name, width, most, val
        self.first = 1 if val == 0 else 0
        self.complete = complete  # shards before this one are full, and the last of them hidden
        self.ntok = 0             # in the one that is being filled
        self.file = None
        for i in range(self.first, complete - 1):
            self.publish(i)
        if complete > self.first and not os.path.exists(self.hidden(complete - 1)):
            raise UserError(f"{self.hidden(complete - 1)} is missing: take --force to start over")
        self.open()

    def hidden(self, i):
        return os.path.join(self.out, f".{self.name}_{i:06d}.bin")

    def final(self, i):
        return os.path.join(self.out, f"{self.name}_{'train' if i else 'val'}_{i:06d}.bin")

    def open(self):
        self.file = open(self.hidden(self.complete) + ".tmp", "w+b")
        self.file.write(bytes(1024))
        self.ntok = 0

    def room(self):
        return (self.val if self.complete == 0 and self.val else self.most) - self.ntok

    def add(self, packed):
        self.file.write(packed)
        self.ntok += len(packed) // self.width

    def close(self):
        """The shard is full. Call publish(complete - 2) when it is written down that it is there."""
        self.seal(self.file, self.ntok)
        os.replace(self.hidden(self.complete) + ".tmp", self.hidden(self.complete))
        self.complete += 1
        self.open()

    def seal(self, f, ntok):
        f.seek(0)
        f.write(header(ntok, self.width))
        f.flush()
        os.fsync(f.fileno())
        f.close()

    def publish(self, i):
        if os.path.exists(self.hidden(i)):
            os.replace(self.hidden(i), self.final(i))
        elif not os.path.exists(self.final(i)):
            raise UserError(f"{self.final(i)} is missing: take --force to start over")

    def copy(self, sources, begin, end, path):
        """Tokens begin ... end-1 of the sources, one after the other, as a shard."""
        total = end - begin
        with open(path, "w+b") as f:
            f.write(bytes(1024))
            for source, ntok in sources:
                lo, hi = max(0, min(begin, ntok)), max(0, min(end, ntok))
                source.seek(1024 + lo * self.width)
                left = (hi - lo) * self.width
                while left:
                    block = source.read(min(left, BLOCK))
                    if not block:
                        raise UserError(f"{source.name} has become shorter")
                    f.write(block)
                    left -= len(block)
                begin, end = begin - ntok, end - ntok
            self.seal(f, total)

    def finish(self, what):
        """Writes the last shards. what: the input, for the message that it is too short."""
        self.file.flush()
        sources, start = [(self.file, self.ntok)], self.complete
        if self.complete > self.first:
            start -= 1
            held = open(self.hidden(start), "rb")
            sources.insert(0, (held, (os.path.getsize(self.hidden(start)) - 1024) // self.width))
        total = sum(n for _, n in sources)
        nval = 0 if start else total // 10 if self.val is None else self.val
        if total - nval < 2 or (start == 0 and nval < 2):
            raise UserError(f"{what} makes {total} tokens, {nval} of them to validate: at least 2 to train "
                            f"and 2 to validate are needed (--val-tokens)")
        parts = [(0, nval)] * (start == 0) + [(nval + b, nval + e) for b, e in cut(total - nval, self.most)]
        new = {self.final(start + i): (b, e) for i, (b, e) in enumerate(parts)}
        for path, (b, e) in new.items():
            self.copy(sources, b, e, path + ".tmp")
        for path in new:
            os.replace(path + ".tmp", path)
        for source, _ in sources:
            source.close()

    def clean(self):
        """Removes what finish() has read, once it is written down that all is done."""
        for i in (self.complete - 1, self.complete):
            for path in (self.hidden(i), self.hidden(i) + ".tmp"):
                if os.path.exists(path):
                    os.remove(path)
