"""Downloads: whole, checked, and continued where they stopped. Files of a data set on the Hugging Face hub.

A download grows as NAME.part and is renamed when its length, and its SHA-256 where one is known, are right.
What NAME.part is a part of stands in NAME.part.json: it is continued only if the server still has the same.
"""
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request

from report import Progress, UserError, amount, save

BLOCK = 1 << 20
HUB = "https://huggingface.co"
MOST_PAGES, MOST_LIST = 1000, 1 << 26  # of a list of files: pages, bytes a page


class Retry(Exception):
    """It may work the next time."""

    def __init__(self, reason, wait=None):
        super().__init__(reason)
        self.wait = wait  # seconds, if the server has said how long


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and keeps what the hub says of the file behind. The token goes to no other host."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None:
            new.linked = getattr(req, "linked", {})
            for name in ("X-Linked-Etag", "X-Linked-Size"):
                if headers.get(name):
                    new.linked[name] = headers[name].strip('"')
            before, after = (urllib.parse.urlsplit(r.full_url) for r in (req, new))
            token = req.unredirected_hdrs.get("Authorization")
            if token and before[:2] == after[:2]:
                new.add_unredirected_header("Authorization", token)
        return new


class Client:
    """How to ask: patience, and the hub's token."""

    def __init__(self, timeout=60, retries=5, wait=1, hub=HUB, token=None):
        self.timeout, self.retries, self.wait = timeout, retries, wait
        self.hub, self.token = hub.rstrip("/"), token
        self.opener = urllib.request.build_opener(Redirects)
        self.opener.addheaders = [("User-Agent", "train_gpt"), ("Accept-Encoding", "identity")]

    def open(self, url, headers=()):
        """The answer, and what the hub said of the file. Raises UserError where a Retry can't help."""
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url}: want a URL that begins with http:// or https://")
        req = urllib.request.Request(url, headers=dict(headers))
        if self.token and url.startswith(self.hub + "/"):
            req.add_unredirected_header("Authorization", f"Bearer {self.token}")
        # a redirect's request is a new one: the dictionary is shared with it
        req.linked = {}
        try:
            return self.opener.open(req, timeout=self.timeout), req.linked
        except urllib.error.HTTPError as e:
            e.close()
            if e.code in (408, 416, 425, 429) or e.code >= 500:
                after = e.headers.get("Retry-After", "")
                wait = int(after) if after.isdigit() else None
                raise Retry(f"HTTP status {e.code} {e.reason}", wait) from None
            hint = {401: "; set HF_TOKEN", 403: "; set HF_TOKEN, or accept the data set's terms on its page"}
            reason = " ".join(str(e.reason).split())
            raise UserError(f"{url}: HTTP status {e.code} {reason}{hint.get(e.code, '')}") from None
        except urllib.error.URLError as e:
            if isinstance(e.reason, ssl.SSLCertVerificationError):
                raise UserError(f"{url}: {e.reason}") from None
            raise Retry(str(e.reason)) from None
        except (OSError, http.client.HTTPException) as e:
            raise Retry(f"{type(e).__name__}: {e}") from None

    def persist(self, url, attempt, got=lambda: 0):
        """attempt() until it raises no Retry, with growing waits. got(): bytes so far; more renew it."""
        tries, before = 0, got()
        while True:
            try:
                return attempt()
            except Retry as e:
                now = got()
                tries = 1 if now - before >= BLOCK else tries + 1
                before = now
                if tries > self.retries:
                    raise UserError(f"{url}: {e}; gave up after {tries} tries; "
                                    f"the same command goes on") from None
                wait = min(60, self.wait * 2 ** (tries - 1) if e.wait is None else e.wait)
                print(f"{url}: {e}; again in {wait:g} s", flush=True)
                time.sleep(wait)


def read_block(answer):
    try:
        return answer.read1(BLOCK)  # not read(), which drops what has come before a timeout
    except (OSError, http.client.HTTPException) as e:
        raise Retry(f"{type(e).__name__}: {e}") from None


def no_page(url, answer, start=b""):
    """HTML where data should be is what proxies, logins and moved files look like."""
    kind = answer.headers.get("Content-Type", "").lower()
    if "html" in kind or start[:200].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise UserError(f"{url}: got a web page ({kind or 'no content type'}), not data: "
                        f"has it moved, or does a proxy want a login?")


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


class Download:
    """One file on its way. size, sha256: what it must have, where known. quiet: no progress is shown."""

    def __init__(self, client, url, path, size, sha256, quiet):
        self.client, self.url, self.path, self.size, self.sha256 = client, url, path, size, sha256
        self.quiet = quiet
        self.part, self.mark = path + ".part", path + ".part.json"
        self.resumed = False

    def have(self):
        return os.path.getsize(self.part) if os.path.exists(self.part) else 0

    def drop(self):
        for f in (self.part, self.mark):
            if os.path.exists(f):
                os.remove(f)

    def known(self):
        """What the part is a part of: its URL, ETag and length as the server had said them."""
        try:
            with open(self.mark, encoding="utf-8") as f:
                known = json.load(f)
            return known if known.get("url") == self.url else {}
        except (OSError, ValueError, AttributeError):
            return {}

    def begin(self):
        """Asks for the rest, or for all. Returns the answer, where it starts, and the file's length."""
        known, have = self.known(), self.have()
        headers = {}
        if have and known.get("etag"):
            headers = {"Range": f"bytes={have}-", "If-Range": known["etag"]}
        try:
            answer, linked = self.client.open(self.url, headers)
        except Retry as e:
            if "416" in str(e):  # there is no such range: the part is of something else
                self.drop()
            raise
        no_page(self.url, answer)
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isdigit() else None
        start = 0
        if answer.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
            if not headers or not span or int(span[1]) != have:
                self.drop()
                raise Retry("the server sent another range than asked for")
            start, total = have, int(span[2])
        if linked.get("X-Linked-Size", "").isdigit() and self.size is None:
            self.size = int(linked["X-Linked-Size"])
        if re.fullmatch("[0-9a-f]{64}", linked.get("X-Linked-Etag", "")) and self.sha256 is None:
            self.sha256 = linked["X-Linked-Etag"]
        if total is None:
            total = self.size
        if total is None:
            raise UserError(f"{self.url}: the server doesn't say how long it is, so no check is possible; "
                            f"download it by other means")
        if self.size is not None and total != self.size:
            self.drop()
            raise UserError(f"{self.url}: is of {total} bytes, {self.size} expected; has it changed?")
        etag = answer.headers.get("ETag", "")
        etag = "" if etag.startswith("W/") else etag  # a weak one doesn't promise the same bytes
        mark = json.dumps({"url": self.url, "etag": etag, "bytes": total}).encode()
        save(self.mark, lambda f: f.write(mark))
        return answer, start, total

    def attempt(self):
        if self.known().get("bytes") == self.have() != 0:
            return  # a run was stopped before it could check and rename
        answer, start, total = self.begin()
        self.resumed = start > 0
        free = shutil.disk_usage(os.path.dirname(self.path)).free
        if total - start > free:
            raise UserError(f"{self.path}: needs {amount(total - start)}, {amount(free)} are free")
        progress = Progress(f"download {os.path.basename(self.path)}", total, start)
        try:
            with answer, open(self.part, "r+b" if start else "wb") as f:
                f.seek(start)
                done = start
                while block := read_block(answer):
                    if done == 0:
                        no_page(self.url, answer, block)
                    f.write(block[:total - done])
                    done += len(block)
                    if done > total:
                        raise UserError(f"{self.url}: sends more than the {total} bytes expected")
                    if not self.quiet:
                        progress.at(done)
                f.flush()
                os.fsync(f.fileno())
        finally:
            if not self.quiet:
                progress.end()
        if done < total:
            raise Retry(f"ended after {done} of {total} bytes")

    def run(self):
        self.client.persist(self.url, self.attempt, self.have)
        if self.sha256 and (found := sha256_of(self.part)) != self.sha256:
            self.drop()
            if not self.resumed:
                raise UserError(f"{self.url}: its SHA-256 is {found}, {self.sha256} expected")
            print(f"{self.url}: continued, it has another SHA-256; from its beginning again", flush=True)
            self.resumed = False
            return self.run()
        os.replace(self.part, self.path)
        self.drop()


def fetch(client, url, path, size=None, sha256=None, quiet=False):
    """Downloads url as path, unless it is there with that size."""
    if os.path.exists(path):
        there = os.path.getsize(path)
        if size is None or there == size:
            return
        raise UserError(f"{path}: is of {there} bytes, {size} expected: remove it")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Download(client, url, path, size, sha256, quiet).run()


def get_list(client, url):
    """A page of JSON, and the URL of the page after it or None."""
    answer, _ = client.open(url)
    with answer:
        no_page(url, answer)
        text = b""
        while block := read_block(answer):
            text += block
            if len(text) > MOST_LIST:
                raise UserError(f"{url}: a list of more than {amount(MOST_LIST)}")
        length = answer.headers.get("Content-Length", "")
        if length.isdigit() and len(text) != int(length):
            raise Retry(f"ended after {len(text)} of {length} bytes")
        after = re.search(r'<([^>]*)>\s*;\s*rel="next"', answer.headers.get("Link", ""))
    try:
        return json.loads(text), after and after[1]
    except ValueError:
        raise UserError(f"{url}: not JSON") from None


def hub_files(client, dataset, folder, ending, revision="main"):
    """The files of a data set's folder on the hub, sorted: dicts of name, url, size, sha256 (or None)."""
    quoted = urllib.parse.quote(revision, safe="")
    url = first = f"{client.hub}/api/datasets/{dataset}/tree/{quoted}/{folder}".rstrip("/")
    files = []
    for _ in range(MOST_PAGES):
        page, after = client.persist(url, lambda: get_list(client, url))
        try:
            for entry in page:
                name = entry["path"].rsplit("/", 1)[-1]
                if entry["type"] != "file" or not name.endswith(ending):
                    continue
                if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
                    raise UserError(f"{first}: lists a file of a strange name, {ascii(name)}")
                path = urllib.parse.quote(entry["path"])
                files.append({"name": name, "url": f"{client.hub}/datasets/{dataset}/resolve/{quoted}/{path}",
                              "size": int(entry["size"]), "sha256": (entry.get("lfs") or {}).get("oid")})
        except (TypeError, KeyError, ValueError, AttributeError):
            raise UserError(f"{first}: not the hub's list of files") from None
        if not after:
            break
        # a mirror hands on the hub's own addresses
        after = urllib.parse.urlsplit(after)
        url = f"{client.hub}{after.path}?{after.query}"
    else:
        raise UserError(f"{first}: a list of more than {MOST_PAGES} pages")
    if not files:
        raise UserError(f"{first}: lists no file *{ending}")
    return sorted(files, key=lambda f: f["name"])
