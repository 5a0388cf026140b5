"""What tests of the program share: runs of it with a time limit, folders compared, data. program_test.py, mesh_test.py
and others use it; it is no test itself. B is the folder of the build; everything else lies in a temporary folder.
"""

import array, concurrent.futures, hashlib, os, re, resource, shutil, signal, struct, subprocess, sys, tempfile
import threading, time

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
PROGRAM = os.path.abspath(os.path.join(os.environ.get("B", "build/cpu-BF16-mpi"), "train_gpt"))
DEVICE = re.match("cpu|cuda|emu", os.path.basename(os.path.dirname(PROGRAM))).group()
MPI = "-mpi" in os.path.dirname(PROGRAM)
MODEL = "L=1,C=32,NH=4,V=256,maxT=64"
# no measuring of link and peak at start: it takes longer than these runs. Other devices have speeds of their own
QUICK = ["--link", "1000,0", "--pace", "1000"] if DEVICE == "cpu" else []
os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
passed = failed = 0
folder = tempfile.TemporaryDirectory()
tmp = folder.name
lock = threading.Lock()
pool = concurrent.futures.ThreadPoolExecutor(2)


def check(ok, what):
    global passed, failed
    with lock:
        passed, failed = passed + bool(ok), failed + (not ok)
        if not ok:
            print(f"{os.path.basename(sys.argv[0])}: failed: {what}", file=sys.stderr, flush=True)


class Run:
    """A run of the program, started; wait() ends it. On `np` processes of mpirun, or one. env: variables beside
    ours, shell: redirections."""

    def __init__(self, *args, np=0, most_file=None, quick=True, command=None, env=None, shell=""):
        own = [PROGRAM, *map(str, args), *(QUICK if quick else [])]
        self.args = command or (["mpirun", "--oversubscribe", "-np", str(np)] if np else []) + own
        if shell:
            self.args = ["sh", "-c", f'exec "$@" {shell}', "sh", *self.args]
        said = [f"{name}={value}" for name, value in (env or {}).items()]
        self.name = " ".join(said + [a for a in self.args if a not in QUICK])[-300:]
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_file, most_file))) if most_file else None
        self.files = [tempfile.TemporaryFile(dir=tmp) for _ in range(2)]
        self.process = subprocess.Popen(self.args, cwd=tmp, stdin=subprocess.DEVNULL, stdout=self.files[0],
                                        stderr=self.files[1], start_new_session=True, preexec_fn=limit,
                                        env={**os.environ, **env} if env else None)
        self.start = time.time()

    def text(self, i):
        return os.pread(self.files[i].fileno(), 1 << 22, 0).decode(errors="replace")

    def wait(self, limit=200):
        end, self.rc = self.start + limit, None
        while self.rc is None and time.time() < end:
            time.sleep(0.005)
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.rc = self.process.returncode = os.waitstatus_to_exitcode(status)
                self.peak_mib = usage.ru_maxrss / 1024
        self.seconds = time.time() - self.start
        check(self.rc is not None, f"no end within {limit} s: {self.name}")
        if self.rc is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.out, self.err = self.text(0), self.text(1)
        for f in self.files:
            f.close()
        return self

    def wait_for(self, what, limit=200):
        """Waits until the program has printed it."""
        end = time.time() + limit
        while what not in self.text(0) and time.time() < end and not self.ended():
            time.sleep(0.002)
        check(what in self.text(0), f"'{what}' is printed: {self.name}: {self.text(1)}")

    def ended(self):
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ranks(self):
        """The processes that mpirun started."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as f:
            return [int(pid) for pid in f.read().split()]


def data(train="a_train*", val="a_val*"):
    return ["-i", train, "-j", val]


def train(*args, model=MODEL, **how):
    """Trains without validation and samples, unless args say so."""
    args = list(args)
    for flag, value in (("-v", 0), ("-s", 0), ("-b", 4), ("-t", 16)):
        if flag not in args:
            args += [flag, value]
    return Run(*([] if "-i" in args else data()), "-e", model, *args, **how)


def succeeds(run, limit=200):
    run.wait(limit)
    check(run.rc == 0, f"exit status {run.rc}: {run.name}: {run.err}")
    return run


def listing(folder):
    """{file: digest} of what is in a folder; main.log, which has times, by its steps alone."""
    files = {}
    if not os.path.isdir(f"{tmp}/{folder}"):
        return files
    for name in sorted(os.listdir(f"{tmp}/{folder}")):
        with open(f"{tmp}/{folder}/{name}", "rb") as f:
            files[name] = hashlib.sha1(f.read()).hexdigest()
    return files


def same(a, b, what):
    """Two folders hold the same checkpoints, and there are some."""
    a, b = listing(a), listing(b)
    for files in (a, b):
        files.pop("main.log", None)
    check(a == b and a, f"{what}: the same files\n  {a}\n  {b}")


def losses(folder):
    with open(f"{tmp}/{folder}/main.log") as f:
        return [float(x) for x in re.findall(r"trl:(\S+)", f.read())]


def close(a, b, tolerance, what):
    check(len(a) == len(b) > 0 and all(abs(x - y) <= tolerance for x, y in zip(a, b)), f"{what}: {a} {b}")


def at_once(*jobs):
    """Runs functions, two at a time, and hands on what they raise."""
    for job in [pool.submit(job) for job in jobs]:
        job.result()


def reported(out):
    """{operation: [(bytes, messages) of each rank]} of --comm-report."""
    table = {}
    for line in out[out.index("sent in step"):].splitlines()[1:]:
        words = re.match(r"(\S.*?) +(tp|up|dp\*up|dp|world|all) +([\d ]+)$", line)
        if words:
            numbers = [int(x) for x in words.group(3).split()]
            table[words.group(1)] = list(zip(numbers[::2], numbers[1::2]))
    return table


def steps(folder):
    return [int(f[5:]) for f in sorted(os.listdir(f"{tmp}/{folder}")) if f.startswith("DONE_")]


def listing_names(folder):
    return os.listdir(f"{tmp}/{folder}") if os.path.isdir(f"{tmp}/{folder}") else []


def read(name):
    with open(f"{tmp}/{name}", "rb") as f:
        return f.read()


def write(name, *parts):
    with open(f"{tmp}/{name}", "wb") as f:
        f.write(b"".join(parts))
    return name


def words(raw, **changes):
    """A file's bytes with some words of its header, w0=..., changed."""
    raw = bytearray(raw)
    for name, value in changes.items():
        struct.pack_into("<i", raw, 4 * int(name[1:]), value)
    return bytes(raw)


def shard(name, tokens, wide=False):
    head = struct.pack("<256i", *((20240801, 7) if wide else (20240520, 1)), len(tokens), *[0] * 253)
    return write(name, head, array.array("I" if wide else "H", tokens).tobytes())


# ---- data --------------------------------------------------------------------------------------------------
def prepare(name, text, *options):
    write(f"{name}.txt", text)
    subprocess.run([sys.executable, "data/prepare.py", f"{tmp}/{name}.txt", "--out", tmp, "--name", name,
                    *options], check=True, stdout=subprocess.DEVNULL)


def make_data():
    state, parts = 1, []
    nouns = "king queen sword crown night day ghost fool ship storm letter garden".split()
    verbs = "sees loves fears hides finds takes breaks calls".split()
    for _ in range(600):
        state = state * 1103515245 + 12345 & 0x7fffffff
        noun, verb, other = nouns[state >> 8 & 7], verbs[state >> 12 & 7], nouns[state >> 16 & 7]
        parts.append(f"The {noun} {verb} the {other}.\n")
    text = "".join(parts).encode()
    prepare("a", text)
    prepare("wide", text, "--uint32")
    prepare("many", text[:4000], "--shard-tokens", "700")  # an epoch is a few steps


def refused(says, *args, model=MODEL, folder="bad", left=(), np=0, **how):
    """One line on stderr that says all this, exit status 1, and nothing new in the output folder."""
    folder = folder if "-o" in args else f"{folder}{abs(hash((says, args, model)))}"
    before = listing(folder)
    run = train(*args, *([] if "-o" in args else ["-o", folder]), model=model, np=np, **how).wait(40)
    lines = run.err.splitlines()
    if np:
        lines = [x for x in lines if says.split("|")[0] in x]
    check(run.rc != 0 and run.rc is not None, f"exit status {run.rc}: {run.name}")
    check(len(lines) == 1, f"one line: {run.name}: {run.err}")
    for part in says.split("|"):
        check(part in run.err, f"'{part}' is said: {run.name}: {run.err}")
    check("*.c:" not in run.err and not re.search(r"\.cu?:\d+ ", run.err), f"a user's error: {run.err}")
    left = (*left, "train_gpt.lock")  # of who ended with others; it locks nothing any more
    after = {f: d for f, d in listing(folder).items() if f not in left}
    check(after == {f: d for f, d in before.items() if f not in left}, f"nothing is left: {run.name}: {after}")
    return run


def main(tests, *makers):
    """Makes data, runs the tests, or those alone that ONLY names, and exits."""
    if not os.path.exists(PROGRAM):
        print(f"{PROGRAM} is missing: make", file=sys.stderr)
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    only = os.environ.get("ONLY", "")
    with folder:
        for maker in (make_data, *makers):
            maker()
        for test in tests:
            start = time.time()
            if only in test.__name__:
                test()
                print(f"{test.__name__}: {time.time() - start:.0f} s", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed != 0 or passed == 0)
