"""Documents of a file: plain text, JSON lines, a JSON array, parquet, alone or packed, never whole in memory.

What a file is, its name says:
  .jsonl .ndjson   a JSON object a line; a document is its field (--field)
  .json            an array of such objects
  .parquet         a column of strings; needs the package pyarrow
  .tar .tgz .zip   files of these kinds, in the order in which they stand there; nothing is unpacked to disk
  .gz .xz .zst     any of them but parquet and zip, packed (.zst by the program zstd)
  anything else    text; <|endoftext|> stands between documents
"""
import codecs
import gzip
import itertools
import json
import lzma
import os
import subprocess
import tarfile
import zipfile
import zlib

from report import UserError

BLOCK = 1 << 20      # bytes read at once
LONGEST = 1 << 26    # bytes of a JSON line, characters of a JSON object
SEPARATOR = "<|endoftext|>"
TEXT, LINES, ARRAY = (".txt", ".text"), (".jsonl", ".ndjson"), (".json",)
BROKEN = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError,
          NotImplementedError)


def utf8(f, where):
    """The file's text in blocks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    while True:
        block = f.read(BLOCK)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as e:
            raise UserError(f"{where} is not UTF-8: byte 0x{e.object[e.start]:02x} at position "
                            f"{done - pending + e.start}; convert it first, e.g. with iconv") from None
        if text:
            yield text
        if not block:
            return
        done += len(block)


def text_documents(blocks, separator, kept):
    """Pieces (begins, text) of the documents between separators. Empty ones are left out. kept: the separator
    belongs to the document before it."""
    rest, begins = "", True
    for block in blocks:
        rest += block
        while (at := rest.find(separator)) >= 0:
            document = rest[:at + len(separator) * kept]
            if document:
                yield begins, document
            rest, begins = rest[at + len(separator):], True
        # what may be the beginning of a separator waits for the next block
        sure = len(rest) - len(separator) + 1
        if sure > 0:
            yield begins, rest[:sure]
            rest, begins = rest[sure:], False
    if rest:
        yield begins, rest


def field_of(item, field, where):
    if not isinstance(item, dict) or not isinstance(item.get(field), str):
        has = ", ".join(sorted(item)[:8]) if isinstance(item, dict) else type(item).__name__
        raise UserError(f"{where}: no text in field {field!r}; there is: {ascii(has)[1:-1] or 'nothing'} "
                        f"(--field)")
    try:
        item[field].encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: half of a surrogate pair in field {field!r}, which is no text") from None
    return item[field]


def json_items(f, where):
    """The objects of JSON lines, each with the place where it stands."""
    for number in itertools.count(1):
        line = f.readline(LONGEST + 1)
        if not line:
            return
        if len(line) > LONGEST:
            raise UserError(f"{where} line {number}: is longer than {LONGEST} bytes")
        if line.isspace():
            continue
        try:
            item = json.loads(line.decode())
        except UnicodeDecodeError as e:
            raise UserError(f"{where} line {number}: is not UTF-8: byte 0x{e.object[e.start]:02x} at "
                            f"position {e.start}") from None
        except (ValueError, RecursionError) as e:
            raise UserError(f"{where} line {number}: is not JSON: {e}") from None
        yield item, f"{where} line {number}"


def json_array(blocks, field, where):
    """The texts of a file that is one array of objects."""
    decode, number, rest, at, array = json.JSONDecoder().raw_decode, 0, "", 0, None
    for block in itertools.chain(blocks, [None]):
        rest, at = rest[at:] + (block or ""), 0
        while True:
            while at < len(rest) and rest[at] in " \t\r\n,":
                at += 1
            if at == len(rest):
                break
            if array is None and rest[at] == "[":
                array, at = "open", at + 1
            elif array == "open" and rest[at] == "]":
                array, at = "closed", at + 1
            elif array != "open":
                raise UserError(f"{where}: is not a JSON array of objects; JSON lines are named .jsonl")
            else:
                try:
                    item, at = decode(rest, at)
                except (ValueError, RecursionError) as e:
                    if block is None or len(rest) - at > LONGEST:
                        raise UserError(f"{where}: object {number + 1} is not JSON: {e}"[:200]) from None
                    break  # it may go on in the next block
                number += 1
                yield field_of(item, field, f"{where} object {number}")
    if array != "closed":
        raise UserError(f"{where}: ends before its array does; is it all there?")


def zstd(path):
    """What the program zstd unpacks, as a stream."""
    try:
        return subprocess.Popen(["zstd", "-dcq", "--", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise UserError(f"{path}: .zst needs the program zstd: apt-get install zstd") from None


class Source:
    """An input file. Iterating gives pieces (begins, text); done() says how many of its bytes are read.

    raw: text files are taken as they are, as one. separator, kept: between documents of a text. strip: blanks
    around documents are left out.
    """

    def __init__(self, path, field="text", raw=False, separator=SEPARATOR, kept=False, strip=False):
        self.path, self.field, self.raw, self.separator, self.kept = path, field, raw, separator, kept
        self.strip = strip
        self.nbytes = os.path.getsize(path)
        self.done = lambda: 0
        self.passed_over = 0  # files of an archive that are of no known kind

    def __iter__(self):
        try:
            with open(self.path, "rb") as f:
                self.done = lambda: f.tell() if not f.closed else self.nbytes
                if self.path.endswith(".parquet"):
                    yield from self.parquet()
                elif self.path.endswith(".zip"):
                    yield from self.zip(f)
                else:
                    yield from self.stream(f, self.path, self.path)
        except BROKEN as e:
            raise UserError(f"{self.path}: is broken or not what its name says: "
                            f"{e or type(e).__name__}") from None
        self.done = lambda: self.nbytes

    def stream(self, f, name, where):
        """Pieces of a file that is read from its beginning to its end."""
        name = name.lower()
        if name.endswith(".tgz"):
            name = name[:-4] + ".tar.gz"
        if name.endswith(".gz"):
            yield from self.stream(gzip.GzipFile(fileobj=f), name[:-3], where)
        elif name.endswith(".xz"):
            yield from self.stream(lzma.open(f), name[:-3], where)
        elif name.endswith(".zst"):
            yield from self.unzstd(name[:-4], where)
        elif name.endswith(".tar"):
            yield from self.tar(f)
        elif name.endswith(LINES):
            items = json_items(f, where)
            yield from self.objects(field_of(item, self.field, place) for item, place in items)
        elif name.endswith(ARRAY):
            yield from self.objects(json_array(utf8(f, where), self.field, where))
        elif self.raw:
            yield from ((False, text) for text in utf8(f, where))
        else:
            yield from text_documents(utf8(f, where), self.separator, self.kept)

    def objects(self, texts):
        for text in texts:
            text = text.strip() if self.strip else text
            if text:
                yield True, text

    def known(self, name):
        """Is this file of an archive one to read?"""
        name = name.lower()
        for packed in (".gz", ".xz"):
            name = name[:-len(packed)] if name.endswith(packed) else name
        good = name.endswith(TEXT + LINES + ARRAY)
        self.passed_over += not good
        return good

    def tar(self, f):
        with tarfile.open(fileobj=f, mode="r|") as tar:
            for member in tar:
                tar.members = []  # it would remember each
                if member.isfile() and self.known(member.name):
                    yield from self.stream(tar.extractfile(member), member.name,
                                           f"{self.path}: {ascii(member.name)[1:-1]}")

    def zip(self, f):
        with zipfile.ZipFile(f) as archive:
            for member in archive.infolist():
                if not member.is_dir() and self.known(member.filename):
                    try:
                        with archive.open(member) as g:
                            yield from self.stream(g, member.filename,
                                                   f"{self.path}: {ascii(member.filename)[1:-1]}")
                    except RuntimeError as e:  # a password
                        raise UserError(f"{self.path}: {e}") from None

    def unzstd(self, name, where):
        if where != self.path:
            raise UserError(f"{where}: .zst inside of an archive is not read")
        process = zstd(self.path)
        try:
            yield from self.stream(process.stdout, name, where)
            said = process.stderr.read().decode(errors="replace").strip()
            if process.wait() != 0:
                raise UserError(f"{where}: {said or 'zstd failed'}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def parquet(self):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"{self.path}: parquet needs the package pyarrow: pip install pyarrow") from None
        try:
            file = pyarrow.parquet.ParquetFile(self.path, pre_buffer=False)
            kind = {c.name: c.type for c in file.schema_arrow}.get(self.field)
            if kind not in (pyarrow.string(), pyarrow.large_string()):
                raise UserError(f"{self.path}: no column {self.field!r} of strings; there is: "
                                f"{', '.join(file.schema_arrow.names)} (--field)")
            rows, all_rows = 0, max(1, file.metadata.num_rows)
            self.done = lambda: self.nbytes * rows // all_rows
            # threads would read ahead, and their memory grow
            for batch in file.iter_batches(batch_size=256, columns=[self.field], use_threads=False):
                texts = batch.column(0).to_pylist()
                rows += len(texts)
                yield from self.objects(text for text in texts if text)
        except (pyarrow.ArrowException, OSError) as e:
            raise UserError(f"{self.path}: {' '.join(str(e).split())[:200]}") from None
