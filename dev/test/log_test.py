#!/usr/bin/python3
"""What the program logs and how it may be looked at: --log-json, main.log, the dump at a NaN, the progress bar,
--profile, -lg, the scripts that plot; that AdamW's and the seeds' options have their meaning; that doc/options.md is
--help. ONLY=json runs test_json alone.
"""

import ast, fcntl, json, math, os, pty, re, struct, subprocess, sys, termios

import numpy

from program import (MPI, PROGRAM, Run, at_once, check, data, listing_names, main, read, same, succeeds, tmp, train,
                     write)

sys.dont_write_bytecode = True
sys.path[:0] = ["dev", "scripts"]
import checkpoint
import logs
import to_tensorboard

MODEL = "L=2,C=32,NH=4,V=256,maxT=64"
# operations take their time, so that a bar is drawn
SLOW = ["--link", "1000,0", "--pace", "0.00004"]


def objects(name):
    return [json.loads(line) for line in read(name).decode().splitlines()]


def step_lines(out):
    """The numbers of each step line, by their names on it."""
    number = r"([-+\d.e]+|[-+]?nan)"
    pattern = (rf"step +(?P<step>\d+)/\d+ \| loss {number} \({number}z\)\| norm {number} \({number}z\)\| "
               rf"lr {number} \| {number} ms \| {number}% \w+ MFU \| {number} tok/s \| comm {number} ms "
               rf"exposed {number} ms")
    names = ["step", "loss", "loss_z", "norm", "norm_z", "lr", "ms", "mfu", "tok_s", "comm_ms", "exposed_ms"]
    return [dict(zip(names, m.groups())) for m in re.finditer(pattern, out)]


# ---- options -----------------------------------------------------------------------------------------------
def test_no_arguments():
    run, asked = succeeds(Run(quick=False)), succeeds(Run("--help", quick=False))
    check(run.out == asked.out and "usage:" in run.out and run.err == "", f"no arguments: {run.out[:200]} {run.err}")


def help_rows(out):
    """{name: default} of --help."""
    rows, name = {}, None
    for line in out.splitlines():
        option = re.match(r" +(?:(-\w+), )?(--[\w-]+)", line)
        if option:
            name = option.group(2)
            rows[name] = [option.group(1), ""]
        default = re.search(r"default (.*)\)$", line)
        if default:
            rows[name][1] = default.group(1)
    return rows


def test_document():
    """doc/options.md has each option of --help once, with its letter and its default, and no other."""
    rows = help_rows(succeeds(Run("--help", quick=False)).out)
    with open("doc/options.md") as f:
        told = [re.match(r"\| (?:`(-\w+)` )?`(--[\w-]+)[^|]*`[^|]* \|([^|]*)\|", line) for line in f]
    told = [m.groups() for m in told if m]
    check(sorted(name for _, name, _ in told) == sorted(rows), f"the same options: doc/options.md against --help: "
          f"{sorted(set(rows) ^ {name for _, name, _ in told})}")
    for letter, name, default in told:
        want = rows.get(name, [None, ""])
        check(letter == want[0] and default.strip(" `") == want[1], f"{name} in doc/options.md: {letter}, {default}")


def after_one_step(name, *args):
    """m, v and masters after one step of a model, as one vector each, and what was logged of it."""
    succeeds(train("-x", 1, "-o", name, "--log-json", f"{name}.json", "-l", "1e-3", *args, model=MODEL))
    _, _, arrays = checkpoint.read_optimizer(f"{tmp}/{name}/state_00000001.bin")
    flat = [numpy.concatenate([x.ravel() for x in a.values()]).astype(float) for a in arrays]
    return flat, objects(f"{name}.json")[0]


def nearly(got, want, what, tolerance=1e-5):
    error = numpy.linalg.norm(got - want) / numpy.linalg.norm(want)
    check(error <= tolerance, f"{what}: relative error {error}")


def test_adamw():
    """m = (1 - beta1) g, v = (1 - beta2) g^2, the step lr g / (|g| + eps), and g is scaled down to a norm of --clip."""
    cases = {"plain": [], "betas": ["--beta1", 0.5, "--beta2", 0.8], "eps": ["--eps", 0.01], "clip": ["--clip", 0.125],
             "unclipped": ["--clip", 0]}
    at_once(*(lambda n=n, a=a: results.update({n: after_one_step(n, *a)}) for n, a in cases.items()))
    (m, v, master), logged = results["plain"]
    norm, g = logged["norm"], m / 0.1
    check(1 < norm < 100, f"a norm that is clipped: {norm}")
    nearly(numpy.linalg.norm(g), 1.0, "--clip 1 by default", 1e-3)
    nearly(results["clip"][0][0], 0.125 * m, "m of --clip 0.125")
    nearly(results["clip"][0][1], 0.125 ** 2 * v, "v of --clip 0.125")
    nearly(results["unclipped"][0][0], norm * m, "m of --clip 0")
    nearly(results["betas"][0][0], 5 * m, "m of --beta1 0.5")
    nearly(results["betas"][0][1], 4 * v, "v of --beta2 0.8")
    nearly(v, 0.05 * g * g, "m and v of --beta1 0.9 --beta2 0.95", 1e-4)
    moved = g != 0
    want = 1e-3 * (g / (abs(g) + 1e-8) - g / (abs(g) + 0.01))[moved]
    nearly((results["eps"][0][2] - master)[moved], want, "masters of --eps 0.01", 1e-3)
    check(results["plain"][1]["loss"] == results["eps"][1]["loss"], "the first loss is of the same weights")


results = {}


def test_seeds():
    """Each seed has its meaning, and llm.c's value without it."""
    def said(*args):
        out = succeeds(train("-x", 2, "-s", 2, "-g", 12, *args)).out
        return [s["loss"] for s in step_lines(out)], out[out.index("generating:"):out.index("total average")]

    runs = {"": [], "same": ["--seed", 42, "--data-seed", 42, "--sample-seed", 1337], "weights": ["--seed", 7],
            "data": ["--data-seed", 7], "sample": ["--sample-seed", 7]}
    at_once(*(lambda n=n, a=a: results.update({n: said(*a)}) for n, a in runs.items()))
    check(results["same"] == results[""], f"defaults: {results['same']} {results['']}")
    check(results["weights"][0][0] != results[""][0][0], "--seed: other weights")
    check(results["data"][0][0] != results[""][0][0], "--data-seed: other data")
    (losses, text), (same_losses, other_text) = results[""], results["sample"]
    check(losses == same_losses and text != other_text, "--sample-seed: other text")
    succeeds(train("-x", 1, "-o", "seeded", "--data-seed", 7))
    run = train("-x", 2, "-o", "seeded", "-y", 1).wait()
    check(run.rc == 1 and "another seed: 7, not 42" in run.err and "--data-seed must be" in run.err, run.err)


# ---- logs --------------------------------------------------------------------------------------------------
def close_to(printed, value, what):
    if "nan" in printed:
        check(value is None, f"{what}: {printed}, {value}")
    else:
        digits = len(printed.split("e")[0].split(".")[1]) if "." in printed else 0
        unit = 10.0 ** (int(printed.split("e")[1]) if "e" in printed else 0)
        error = abs(float(printed) - value)
        check(error <= 0.51 * unit * 10.0 ** -digits, f"{what}: {printed} is printed, {value} logged")


def test_json():
    """The step line's numbers, with more digits; validation; the same after a resume as in main.log."""
    mesh = ["--tp", 2, "--dp", 2, "-z", 1, "-k", "constant", "-v", 2, "-m", 1, "-o", "json", "--log-json",
            "json/l.json"]
    first = succeeds(train("-x", 3, *mesh))
    resumed = succeeds(train("-x", 5, "-y", 1, *mesh))
    steps, vals = {}, {}
    for x in objects("json/l.json"):
        check(1.7e9 < x["time"] < 1e11, f"the time: {x}")
        (vals if "val_loss" in x else steps)[x["step"]] = x
    check(sorted(steps) == [0, 1, 2, 3, 4] and sorted(vals) == [0, 2, 3, 4, 5], f"{sorted(steps)}, {sorted(vals)}")
    printed = step_lines(first.out) + step_lines(resumed.out)
    check(len(printed) == 5, f"step lines: {printed}")
    for line in printed:
        x = steps[int(line.pop("step")) - 1]
        for name, text in line.items():
            close_to(text, x[name] and x[name] * (100 if name == "mfu" else 1), f"step {x['step']}, {name}")
        check(x["tokens"] == (x["step"] + 1) * 128, f"tokens: {x}")
        told = {op: int(m) for m, ops in re.findall(r"^  flash:(\d)  (.*/.*)$", (first if x["step"] < 3 else resumed).out, re.M)
                for op in re.findall(r"(\w+) [\d.]+/", ops)}
        check({"F1", "B3"} < set(told) and x.get("chunks_by_op") == (told if x["step"] in (0, 3) else None), f"{told}, {x}")
        # of rank 0 alone, while exposed_ms is the mean of four ranks
        ops = x["exposed_by_op"]
        check({"F1", "B3", "D1", "D3"} < set(ops) and "U1" not in ops, f"operations of the mesh: {ops}")
        check(0 <= sum(ops.values()) <= 4 * x["exposed_ms"] + 1e-6, f"exposed by operation: {sum(ops.values())}, {x}")
    series, main_log = logs.read(f"{tmp}/json/l.json"), logs.read(f"{tmp}/json/main.log")
    for name in ("loss", "val_loss", "lr", "norm"):
        for step, (value, _) in main_log[name].items():
            error = abs(value - series[name][step][0])
            check(error < (6e-3 if name == "norm" else 6e-5), f"main.log: {name} of {step}")
    check(set(logs.read(f"{tmp}/json")["tok_s"]) == {0, 1, 2, 3, 4}, "the folder's logs")
    notebook("json", sorted(steps), sorted(vals))
    single = succeeds(train("-x", 1, "--log-json", "json/l.json"))
    check([x["exposed_by_op"] for x in objects("json/l.json")] == [{}], f"a new run wipes it: {single.out[-200:]}")
    for name, says in (("/dev/full", "No space left"), ("nowhere/l.json", "No such file"), ("json", "Is a directory")):
        run = train("-x", 2, "--log-json", name).wait()
        check(run.rc == 1 and run.err.count("\n") == 1 and name in run.err and says in run.err, f"{name}: {run.err}")


def test_exposed():
    """exposed_by_op of one rank against the step line, whose mean is of two that wait for the same link."""
    slow = ["--link", "0.002,200", "--pace", "1"]
    run = Run(*data(), "-e", MODEL, "-v", 0, "-s", 0, "-b", 4, "-t", 16, "-x", 3, "--tp", 2, "--log-json", "slow.json",
              *slow, quick=False)
    succeeds(run)
    for x in objects("slow.json"):
        mine = sum(x["exposed_by_op"].values())
        check(x["exposed_ms"] > 5 and 0.5 < mine / x["exposed_ms"] < 1.5, f"rank 0 {mine}, mean {x['exposed_ms']}")
        check(x["exposed_by_op"]["F3"] > 0 and x["exposed_by_op"]["B3"] > 0, f"what the link holds up: {x}")


def notebook(folder, steps, vals):
    """main.log as llm.c's notebook takes it: words between blanks, the first s:STEP, the second a stream's."""
    streams = {}
    for line in read(f"{folder}/main.log").decode().splitlines():
        step, value = line.split(" ")[:2]
        check(step[:2] == "s:" and value.split(":")[0] in ("trl", "tel"), f"main.log: {line}")
        streams.setdefault(value.split(":")[0], {})[int(step[2:])] = float(value.split(":")[1])
    check(sorted(streams["trl"]) == steps and sorted(streams["tel"]) == vals, f"streams {streams}")
    check(all(4 < x < 7 for s in streams.values() for x in s.values()), f"losses {streams}")


def test_device():
    run = succeeds(train("-x", 4, "-lg", 2))
    lines = [x for x in run.out.splitlines() if "step  " in x or x.startswith(" " * 20)]
    check([x.startswith(" ") for x in lines] == [False, False, True, False, False, True], f"-lg 2: {lines}")
    told = re.search(r"cpu: load ([\d.]+) on (\d+) cores, memory of the process (\d+) MiB, at most (\d+) MiB", lines[2])
    check(told and int(told.group(2)) == os.cpu_count() and 1 < int(told.group(3)) <= int(told.group(4)) + 1, lines[2])
    check(int(told.group(4)) <= run.peak_mib + 1, f"{told.group(4)} of {run.peak_mib} MiB")


# ---- what was being done when a loss was not finite --------------------------------------------------------
def broken(name, tensor, layer, at, value):
    raw = bytearray(read("plain.bin"))
    nbytes, config = 1024, checkpoint.make_config(64, 256, 2, 4, 32)
    for t, shape in checkpoint.tensor_shapes(config).items():
        size = math.prod(shape)
        if t == tensor:
            place = nbytes + 2 * (layer * (size // 2 if shape[0] == 2 else 0) + at)
            struct.pack_into("<H", raw, place, struct.unpack("<I", struct.pack("<f", value))[0] >> 16)
        nbytes += 2 * size
    write(name, bytes(raw))


def stops(name, model, *args, np=0):
    run = train("-x", 3, "-o", name, *args, model=model, np=np).wait()
    lines = [x for x in run.err.splitlines() if re.match(r"step|rank \d|all micro", x)]
    check(run.rc == 1, f"{name}: exit status {run.rc}")
    check(lines[0].startswith("step 1 of 3: loss ") and "learning rate 3.00e-04" in lines[0], f"{name}: {run.err}")
    check(re.match(r"step 1: the loss is .*--ignore-nan 1 to go on", lines[-1]), f"{name}: {run.err}")
    check(sorted(listing_names(name)) == ["main.log", "nan_1.txt"], f"{name}: {listing_names(name)}")
    return lines, read(f"{name}/nan_1.txt").decode().splitlines()


def test_not_finite():
    succeeds(train("-x", 1, "-l", 0, "-o", "zero", model=MODEL))
    write("plain.bin", read("zero/model_00000001.bin"))
    broken("weight.bin", "fcw", 1, 5 * 32 + 3, math.nan)  # row 5: of the first of two tp ranks
    broken("large.bin", "ln1w", 1, 7, 3e38)
    lines, file = stops("nan", "weight.bin", "--tp", 2, "--dp", 2, "-z", 2, "-d", 256)
    ranks = [x for x in file if "(dp" in x]
    check(len(ranks) == 4, f"a line for each rank: {file}")
    for r, x in enumerate(ranks):
        check(x.startswith(f"rank {r} (dp {r // 2}, up 0, tp {r % 2}): "), f"rank {r}: {x}")
        fcw = "weights are not finite in 1 of 28 tensors, first on the forward pass in fcw layer 1 (1 of 2048 numbers)"
        check((fcw if r % 2 == 0 else "weights are finite") in x, f"rank {r}: {x}")
        check("gradients are not finite in 28 of 28 tensors, first on the backward pass in lnfb (32 of 32" in x, x)
    pattern = r"rank (\d): micro-step (\d) of 2: loss -?nan, from tokens (\d+) to (\d+) of .*a_train_000001.bin"
    micro = [re.match(pattern, x) for x in file if "micro-step" in x]
    check(all(micro) and [m.group(1, 2) for m in micro] == [(r, i) for r in "02" for i in "12"], f"micro-steps: {file}")
    check(len({m.group(3) for m in micro}) == 4 and all(int(m.group(4)) - int(m.group(3)) == 63 for m in micro), file)
    check([x for x in lines[:-2]] == file and "nan/nan_1.txt" in lines[-2], f"stderr says the same: {lines}")
    lines, file = stops("inf", "large.bin", "--up", 2)  # the first that overflows: no weight is to blame
    check(sum("weights are finite" in x for x in file) == 2, f"finite weights: {file}")
    check(all("not finite" in x for x in file if "(dp" in x), f"gradients: {file}")
    lines, file = stops("many", "weight.bin", "-d", 256)
    said, written = sum("micro-step " in x for x in lines), sum("micro-step " in x for x in file)
    check((said, written) == (2, 4), f"micro-steps: {lines} {file}")
    if MPI:
        lines, file = stops("npnan", "weight.bin", "--tp", 2, np=2)
        check(sum("rank" in x and "(dp" in x for x in file) == 2, f"processes: {file}")
    run = train("-x", 3, model="weight.bin").wait()
    check(run.rc == 1 and "fcw layer 1" in run.err and "nan_" not in run.err, f"without a folder: {run.err}")


# ---- a terminal --------------------------------------------------------------------------------------------
def on_terminal(args, columns, env=()):
    """What the program writes to a terminal that is so many columns wide."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(tmp)
        os.environ.update({"TERM": "xterm", **dict(env)})
        os.execvp(args[0], args)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    raw = b""
    while True:
        try:
            block = os.read(fd, 1 << 16)
        except OSError:  # Linux' way to say that the other end is closed
            break
        if not block:
            break
        raw += block
    os.close(fd)
    check(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, f"{args}: {raw[-300:]}")
    return raw.decode()


def screen(raw):
    """The lines that remain, by the few codes that the program uses."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[A-Z]|[\r\n]|[^\x1b\r\n]+", raw):
        if part == "\x1b[A":
            row -= 1
        elif part == "\x1b[K":
            lines[row] = lines[row][:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        else:
            lines[row] = lines[row][:column] + part + lines[row][column + len(part):]
            column += len(part)
    return lines


def without_times(lines):
    times = r"\| [\d.]+ ms \|.*|time: .*|MiB.*|in [\d.]+ s$|after [\d.]+ s$|data: .*"
    return [re.sub(times, "", x).replace("rab", "bar") for x in lines if x]


def test_progress():
    """A bar while a step is computed, and when all is done what a file would have."""
    args = [PROGRAM, *map(str, data()), "-e", "L=1,C=32,NH=4,V=256,maxT=64", "-b", "4", "-t", "16", "-s", "0",
            "-v", "2", "-m", "1", "-x", "4", "-o", "bar", *SLOW]
    plain = Run(command=[a if a != "bar" else "rab" for a in args]).wait()
    check(plain.rc == 0 and "\x1b" not in plain.out and "left" not in plain.out, f"a file: {plain.out[-300:]}")
    raw = on_terminal(args, 60)
    left = screen(raw)
    check(without_times(left) == without_times(plain.out.splitlines()), f"nothing else remains: {left[-8:]}")
    bars = re.findall(r"\[[#.]+\] +\d+/4 .*? left", raw)
    done = [re.sub(r".*\] ", "", x)[:3] for x in bars]
    check(done == ["0/4", "1/4", "2/4", "3/4"], f"a bar before each step: {bars}")
    check(all(len(x) == 59 for x in bars), f"as wide as the window: {bars}")
    check("? left" in bars[1] and re.search(r"\d+s left", bars[2]), f"time left: {bars}")
    raw = on_terminal(args, 60, {"COLUMNS": "40"})
    check(all(len(x) == 39 for x in re.findall(r"\[[#.]+\] .*? left", raw)) and "left" in raw, f"COLUMNS: {raw[-300:]}")
    args[args.index("-x") + 1] = "1"
    check("left" not in on_terminal(args, 60, {"TERM": "dumb"}), "no bar on a terminal that can't")
    if MPI:  # it gathers what its processes write by terminals of its own
        check("left" not in on_terminal(["mpirun", "--oversubscribe", "-np", "2", *args, "--tp", "2"], 60), "mpirun")


# ---- profile -----------------------------------------------------------------------------------------------
def test_profile():
    args = ["-x", 4, "-v", 2, "-m", 1, "--tp", 2]
    at_once(lambda: succeeds(train(*args, "-o", "unprofiled", model=MODEL)))
    run = succeeds(train(*args, "-o", "profiled", "--profile", "2-3", model=MODEL))
    same("unprofiled", "profiled", "--profile changes nothing")
    table = run.out[run.out.index("profile of rank 0"):run.out.index("step    4/4")]
    check(table.startswith("profile of rank 0, a step of 2: "), table[:80])
    ms = float(re.search(r": ([\d.]+) ms", table).group(1))
    compute = table[:table.index("exchanges of tp")]
    rows = re.findall(r"^  (\S.*?) +([\d.]+) +([\d.]+) +([\d.]+)%", compute, re.M)
    names = {name: (float(calls), float(t), float(share)) for name, calls, t, share in rows}
    total = float(re.search(r"^  all +([\d.]+)", compute, re.M).group(1))
    # a layer's gather is two chunks' matmuls, and there are two layers; validation is of no step
    check(names["F1 matmul_forward"][0] == 4 and names["B3 matmul_dgrad"][0] == 4, f"calls a step: {names}")
    check(abs(sum(t for _, t, _ in names.values()) - total) < 0.001 * len(names), f"{total} is their sum")
    check(all(abs(share - 100 * t / ms) < 0.1 for _, t, share in names.values()), f"shares of {ms} ms: {names}")
    check(re.search(r"exchanges of tp(.*\n)+? +F1 +2\.0", table), f"exchanges: {table}")
    run = train("-x", 4, "--profile", "2-9").wait()
    check(run.rc == 1 and "--profile 2-9: the run has 4 steps" in run.err, run.err)
    run = succeeds(train("-x", 4, "-o", "profiled", "-y", 1, "--profile", "2-3", "--tp", 2, model=MODEL))
    check("--profile 2-3 are done already" in run.out and "profile of rank" not in run.out, run.out[-300:])


# ---- scripts -----------------------------------------------------------------------------------------------
def script(name, *args, path=""):
    return subprocess.run([sys.executable, f"scripts/{name}", *(str(a) for a in args)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"})


# stands in for matplotlib: writes into the picture's file what was drawn
DRAWING = '''
import sys, types
drawn = []
class Axis:
    def plot(self, x, y, style, **how): drawn.append((how["label"], list(x), list(y)))
    def __getattr__(self, name): return lambda *a, **k: None
class Figure:
    def savefig(self, path, **how): open(path, "w").write(repr(drawn))
class Pyplot(types.ModuleType):
    def subplots(self, rows, columns, **how): return Figure(), [[Axis()] for _ in range(rows)]
pyplot = sys.modules["matplotlib.pyplot"] = Pyplot("pyplot")
def use(backend): pass
'''


def test_plot():
    write("run.json", b'{"step":0,"time":1.5,"loss":3,"tok_s":7,"mfu":0.5,"lr":1,"comm_ms":4,"exposed_ms":1}\n'
          b'{"step":1,"time":2.5,"loss":9,"tok_s":7}\n{"step":1,"time":3.5,"loss":2,"tok_s":null}\n{"step":2,"lo')
    os.mkdir(f"{tmp}/other")
    write("other/main.log", b"s:0 tel:5.0\ns:0 trl:4.5 lr:0.5 norm:2\n")
    os.makedirs(f"{tmp}/fake/matplotlib")
    write("fake/matplotlib/__init__.py", DRAWING.encode())
    run = script("plot_log.py", f"{tmp}/run.json", f"{tmp}/other", "-o", f"{tmp}/p.png", path=f"{tmp}/fake")
    check(run.returncode == 0, f"plot_log.py: {run.stderr}")
    lines = ast.literal_eval(read("p.png").decode())
    check(("run", [0, 1], [3.0, 2.0]) in lines, f"the later line of a step counts, one cut short does not: {lines}")
    check(("other", [0], [4.5]) in lines and ("other validation", [0], [5.0]) in lines, f"overlaid: {lines}")
    check(("run exposed", [0], [1.0]) in lines and ("run", [0, 1], [7.0, 7.0]) in lines and len(lines) == 9, f"{lines}")
    write("fake/matplotlib/__init__.py", b"raise ImportError")
    write("junk.log", b"s:0 trl:1\nhello\n")
    write("empty.log", b"")
    for name, says in (("run.json", "needs matplotlib"), ("junk.log", "line 2: is neither"), ("gone", "No such file"),
                       ("empty.log", "no steps are logged")):
        run = script("plot_log.py", f"{tmp}/{name}", path=f"{tmp}/fake")
        check(run.returncode == 1 and says in run.stderr and run.stderr.count("\n") == 1, f"{name}: {run.stderr}")


def slow_crc(data):
    """CRC-32C bit by bit: the remainder of the bits, the lowest of a byte first, by 0x11EDC6F41."""
    remainder = 0xffffffff
    for byte in data:
        for bit in range(8):
            top = remainder >> 31 ^ byte >> bit & 1
            remainder = remainder << 1 & 0xffffffff ^ (0x1edc6f41 if top else 0)
    return int(f"{remainder ^ 0xffffffff:032b}"[::-1], 2)


def masked(data):
    crc = slow_crc(data)
    return (crc >> 15 | crc << 17 & 0xffffffff) + 0xa282ead8 & 0xffffffff


def records(raw):
    at = 0
    while at < len(raw):
        n, = struct.unpack_from("<Q", raw, at)
        check(struct.unpack_from("<I", raw, at + 8)[0] == masked(raw[at:at + 8]), "a length's checksum")
        body = raw[at + 12:at + 12 + n]
        check(struct.unpack_from("<I", raw, at + 12 + n)[0] == masked(body), "a record's checksum")
        yield body
        at += 16 + n
    check(at == len(raw), "whole records")


def fields(raw):
    """{number: value} of a protocol buffer's message whose fields come once."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(raw):
        key = varint()
        if key & 7 == 0:
            value = varint()
        elif key & 7 == 2:
            n = varint()
            value, at = raw[at:at + n], at + n
        else:
            size, code = {1: (8, "<d"), 5: (4, "<f")}[key & 7]
            value, at = struct.unpack_from(code, raw, at)[0], at + size
        found[key >> 3] = value
    return found


def test_tensorboard():
    check(slow_crc(b"123456789") == to_tensorboard.crc32c(b"123456789") == 0xe3069283, "CRC-32C's known value")
    write("board.json", b'{"step":0,"time":1.5,"val_loss":8}\n'
          b'{"step":0,"time":2.25,"loss":3,"exposed_by_op":{"F1":0.5}}\n'
          b'{"step":300,"time":9.5,"loss":2.5,"loss_z":null}\n')
    run = script("to_tensorboard.py", f"{tmp}/board.json", "--out", f"{tmp}/events")
    check(run.returncode == 0 and "4 values" in run.stdout, f"{run.stdout} {run.stderr}")
    check(listing_names("events") == ["board"] and len(listing_names("events/board")) == 1, listing_names("events"))
    first, *rest = [fields(body) for body in records(read(f"events/board/{listing_names('events/board')[0]}"))]
    check(first == {1: 1.5, 2: 0, 3: b"brain.Event:2"}, f"the first record: {first}")
    values = [(e[1], e[2], *(fields(fields(e[5])[1])[i] for i in (1, 2))) for e in rest]
    check(sorted(values) == [(1.5, 0, b"loss/validation", 8.0), (2.25, 0, b"communication/exposed_by_op/F1", 0.5),
                             (2.25, 0, b"loss/train", 3.0), (9.5, 300, b"loss/train", 2.5)], f"values: {values}")
    run = script("to_tensorboard.py", f"{tmp}/gone", "--out", f"{tmp}/events")
    check(run.returncode == 1 and run.stderr.count("\n") == 1 and "gone: No such file" in run.stderr, run.stderr)


main([test_no_arguments, test_document, test_adamw, test_seeds, test_json, test_exposed, test_device,
      test_not_finite, test_progress, test_profile, test_plot, test_tensorboard])
