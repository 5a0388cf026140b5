"""What the data scripts share: errors that a user can mend, progress, files that appear whole."""
import os
import sys
import time

PLAIN_S = 10  # seconds between two lines of progress where stderr is no terminal


class UserError(Exception):
    """One line that says what is wrong and what would work."""


def amount(n):
    """A number of bytes, to be read."""
    for unit in ("bytes", "KB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.2f} GB" if n < 1000 else f"{n / 1000:.2f} TB"


def duration(s):
    s = int(s)
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}"


class Progress:
    """How far a long work is: a bar on a terminal, else a line every PLAIN_S seconds. On stderr."""

    def __init__(self, what, total, start=0):
        self.what, self.total, self.start = what, total, start
        self.terminal = sys.stderr.isatty()
        self.began = self.said = time.monotonic()

    def at(self, done, note=""):
        """done of total bytes, by now; note: what else there is to say."""
        now = time.monotonic()
        if now - self.said < (0.2 if self.terminal else PLAIN_S):
            return
        self.said = now
        part = min(1, done / self.total) if self.total else 0
        rate = (done - self.start) / (now - self.began)
        left = f", {duration((self.total - done) / rate)} left" if rate > 0 and self.total >= done else ""
        text = f"{self.what}: {amount(done)} of {amount(self.total)}, {amount(rate)}/s{left}{note}"
        if self.terminal:
            bar = ("#" * int(part * 20)).ljust(20)
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write("\r\033[K" + f"[{bar}] {text}"[:columns - 1])
            sys.stderr.flush()
        else:
            print(text, file=sys.stderr)

    def end(self):
        if self.terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def save(path, write):
    """Makes the file by write(file) under a temporary name, then gives it its own."""
    tmp = path + ".tmp"
    try:
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)
