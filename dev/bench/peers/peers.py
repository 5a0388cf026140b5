#!/usr/bin/python3
"""peers.py -- train_gpt beside PyTorch and llm.c: the same training step, in one run, as a ratio. make bench-peers.

    dev/bench/peers/peers.py [--python PYTHON] [--llmc FOLDER] [--model d12] [-b 4] [-t 1024] [--json FILE]

PyTorch, as it is and by torch.compile, beside train_gpt on one rank with all cores, or on one GPU with --device cuda.
--python names an interpreter that has torch; torch.compile is in 2.0 or later, and needs a C++ compiler.

PyTorch cut over all GPUs, with async TP, beside train_gpt --tp P: with --device cuda, where torch sees at least two.
This part has never run on GPUs.

llm.c's CPU program, fp32, B=4 T=64, which are its constants, beside an FP32 build of train_gpt on the same weights and
shards. --llmc names a checkout in which it was built; it is run as it is, in a temporary folder that has its files.

The programs take turns, so that a noisy machine hurts all alike: in each round each runs --steps steps after one
that warms up, and their median counts. A ratio is a round's tok/s of train_gpt over the peer's: above 1, train_gpt
is faster. The table has medians over rounds, lowest and highest. Ratios of which the highest and the lowest differ
by more than 30 % of the median are "too noisy": then the exit status is 3. A peer that is not there is named, with
how to install it. --json writes all figures. Needs numpy; run from anywhere.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

from shapes import positive, sizes_of

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../../.."))
sys.path.insert(0, os.path.join(ROOT, "dev"))
NOISY = 0.3
LLMC_MOST_STEPS = 40  # train_gpt2 makes 41
VENV = "python3 -m venv build/torch && build/torch/bin/pip install torch numpy, then --python build/torch/bin/python"


class UserError(Exception):
    pass


class Failed(Exception):
    """A program ended with an error; the text is its last line."""


def run(command, **how):
    """-> stdout."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **how)
    except OSError as e:
        raise Failed(str(e)) from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).split("\n")
        raise Failed(f"exit status {done.returncode}: {said[-1]}")
    return done.stdout


# ---- the programs: each is called once a round and returns tok/s --------------------------------------------------
class Program:
    def __init__(self, name, beside=None, missing=None):
        self.name, self.beside, self.rates = name, beside, []
        self.missing, self.failed = missing, False  # why it is not compared

    def ratios(self):
        return [ours / theirs for ours, theirs in zip(self.beside.rates, self.rates)]


class Ours(Program):
    """train_gpt on a shard of random tokens, or on what is given in args."""

    def __init__(self, name, path, o, ntok, args, folder):
        super().__init__(name)
        self.args = args
        self.command = [path, *map(str, args), "-x", str(o.steps + 1), "-v", "0"]
        self.folder, self.ntok, self.precision = folder, ntok, "bf16"

    def rate(self):
        out = run(self.command, cwd=self.folder)
        ms = [float(x) for x in re.findall(r"^step +\d+/\d+ .*?\| ([0-9.]+) ms \|", out, re.M)]
        if len(ms) < 2:
            raise Failed("train_gpt prints no steps")
        precision = re.search(r"^\| precision +\| (\w+)", out, re.M)
        self.precision = precision[1].lower() if precision else self.precision
        return 1e3 * self.ntok / statistics.median(ms[1:])


class Torch(Program):
    def __init__(self, name, beside, o, folder, compiled=False, ranks=1):
        super().__init__(name, beside)
        self.o, self.json, self.compiled, self.ranks = o, os.path.join(folder, "torch.json"), compiled, ranks

    def rate(self):
        o, head = self.o, [os.path.join(HERE, "torch_step.py"), "--precision", self.beside.precision]
        if self.ranks > 1:
            head = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}",
                    os.path.join(HERE, "torch_tp.py")]
        run([o.python, *head, "--model", o.model, "-b", str(o.batch), "-t", str(o.time), "--steps", str(o.steps + 1),
             "--device", o.device, "--json", self.json] + ["--compile"] * self.compiled)
        with open(self.json) as f:
            return json.load(f)["tok_per_s"]


class Llmc(Program):
    def __init__(self, name, beside, path, steps, folder):
        super().__init__(name, beside)
        self.path, self.steps, self.folder = path, steps, folder

    def rate(self):
        ms = []
        # its lines come as they are printed, and it is stopped after as many as are wanted
        with open(os.path.join(self.folder, "stderr"), "w+") as errors:
            process = subprocess.Popen(["stdbuf", "-oL", self.path], cwd=self.folder, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace")
            for line in process.stdout:
                match = re.match(r"step \d+: train loss \S+ \(took ([0-9.]+) ms\)", line)
                ms += [float(match[1])] if match else []
                if len(ms) > self.steps:
                    process.kill()
                    break
            process.communicate()
            errors.seek(0)
            said = errors.read().strip().split("\n")[-1]
        if len(ms) <= self.steps:
            raise Failed(f"exit status {process.returncode} after {len(ms)} steps, {self.steps + 1} wanted: {said}")
        return 1e3 * self.beside.ntok / statistics.median(ms[1:])


# ---- which of them there are --------------------------------------------------------------------------------------
def torch_state(python):
    """-> what torch says of itself in that interpreter: version, compiles, number of GPUs; or why it can't."""
    ask = ("import json, torch; gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
           "print(json.dumps([torch.__version__, hasattr(torch, 'compile'), gpus]))")
    try:
        return json.loads(run([python, "-c", ask]).strip().split("\n")[-1])
    except (Failed, ValueError) as e:
        return f"no PyTorch in {python} ({e}): bash scripts/deps.sh --bench, or {VENV}"


def torch_programs(o, ours, folder):
    said = torch_state(o.python)
    if isinstance(said, str):
        return [Program("PyTorch", ours, said)]
    version, compiles, ngpus = said
    if o.device == "cuda" and ngpus == 0:
        return [Program(f"PyTorch {version}", ours, f"the torch of {o.python} sees no GPU")]
    compiled = Torch(f"PyTorch {version} compiled", ours, o, folder, compiled=True)
    if not compiles:
        compiled.missing = f"torch {version} has no torch.compile, 2.0 or later has: {VENV}"
    programs = [Torch(f"PyTorch {version}", ours, o, folder), compiled]
    if o.device == "cuda" and ngpus > 1 and compiles:
        tp = Ours(f"train_gpt --tp {ngpus}", o.program, o, o.batch * o.time, ours.args + ["--tp", ngpus], folder)
        return programs + [tp, Torch(f"PyTorch {version} async TP", tp, o, folder, compiled=True, ranks=ngpus)]
    why = f"wants at least 2 GPUs and --device cuda; torch {version} sees {ngpus} here"
    return programs + [Program("PyTorch async TP", ours, why)]


def llmc_programs(o, folder):
    import numpy as np
    import checkpoint
    import llmc

    if not o.llmc:
        how = "--llmc FOLDER (LLMC=FOLDER), a checkout of https://github.com/karpathy/llm.c in which 'make train_gpt2' ran"
        return [Program("llm.c", None, how)]
    program = os.path.join(o.llmc, "train_gpt2")
    if not os.access(program, os.X_OK):
        raise UserError(f"--llmc {o.llmc}: there is no program train_gpt2 in it; run 'make train_gpt2' there")
    for path in (llmc.TRAIN, llmc.VAL):
        os.makedirs(os.path.join(folder, os.path.dirname(path)), exist_ok=True)
        tokens = np.random.default_rng(42).integers(0, o.sizes["V"], llmc.B * llmc.T * (o.steps + 8) + 1)
        checkpoint.write_shard(os.path.join(folder, path), tokens)
    config = checkpoint.make_config(**o.sizes)
    rng, params = np.random.default_rng(42), {}
    for name, shape in checkpoint.tensor_shapes(config).items():
        params[name] = np.float32(0.02) * rng.standard_normal(shape, dtype=np.float32)
        params[name] += np.float32(name in ("ln1w", "ln2w", "lnfw"))
    params["wte"][config["V"] :] = 0.0
    checkpoint.write_model(os.path.join(folder, llmc.MODEL), config, params)
    args = ["-e", llmc.MODEL, *llmc.FLAGS]
    ours = Ours("train_gpt, FP32, B=4 T=64", o.program_fp32, o, llmc.B * llmc.T, args, folder)
    return [ours, Llmc("llm.c, fp32, B=4 T=64", ours, os.path.abspath(program), o.steps, folder)]


def programs_of(o, folder):
    import numpy as np
    import checkpoint

    shard = os.path.join(folder, "tokens.bin")
    tokens = np.random.default_rng(42).integers(0, o.sizes["V"], o.batch * o.time * (o.steps + 2) + 1)
    checkpoint.write_shard(shard, tokens)
    args = ["-i", shard, "-j", shard, "-e", o.model, "-b", o.batch, "-t", o.time, "-s", 0]
    ours = Ours("train_gpt", o.program, o, o.batch * o.time, args, folder)
    return [ours] + torch_programs(o, ours, folder) + (llmc_programs(o, folder) if o.device == "cpu" else [])


# ---- rounds and table ---------------------------------------------------------------------------------------------
def take_turns(programs, rounds):
    for number in range(1, rounds + 1):
        for p in programs:
            if p.missing or (p.beside and p.beside.missing):
                continue
            try:
                p.rates.append(p.rate())
            except Failed as e:
                if p.beside is None:
                    raise UserError(f"{p.name}: {' '.join(p.command)}: {e}") from None
                p.missing, p.failed = f"it failed: {e}", True
                continue
            print(f"# round {number}/{rounds}: {p.name}: {p.rates[-1]:.1f} tok/s", flush=True)


def spread(values):
    return dict(median=statistics.median(values), lowest=min(values), highest=max(values))


def results(programs):
    """-> a dict for each program, as --json has it."""
    rows = []
    for p in programs:
        row = dict(name=p.name, beside=p.beside.name if p.beside else None, missing=p.missing, tok_per_s=p.rates)
        if not p.missing:
            row.update(rate=spread(p.rates))
        if not p.missing and p.beside:
            row.update(ratio=spread(p.ratios()))
            row["too_noisy"] = row["ratio"]["highest"] - row["ratio"]["lowest"] > NOISY * row["ratio"]["median"]
        rows.append(row)
    return rows


def print_table(rows):
    print(f"{'program':28} {'tok/s':>9} {'lowest..highest':>19} {'ratio':>7} {'lowest..highest':>15}")
    for row in rows:
        if row["missing"]:
            print(f"{row['name']:28} not compared: {row['missing']}")
            continue
        rate, ratio = row["rate"], row.get("ratio")
        line = f"{row['name']:28} {rate['median']:9.1f} {rate['lowest']:9.1f}..{rate['highest']:<8.1f}"
        if ratio:
            said = f"{ratio['median']:7.2f}" if not row["too_noisy"] else "too noisy"
            line += f" {said} {ratio['lowest']:7.2f}..{ratio['highest']:<6.2f}"
        print(line.rstrip())


def machine():
    try:
        with open("/proc/cpuinfo") as f:
            return re.search(r"^model name\s*: (.*)$", f.read(), re.M)[1]
    except (OSError, TypeError):
        return "unknown processor"


def compare(o):
    head = dict(date=datetime.date.today().isoformat(), machine=machine(), cores=len(os.sched_getaffinity(0)),
                model=o.model, B=o.batch, T=o.time, steps=o.steps, rounds=o.rounds, device=o.device)
    print(f"# {head['date']}, {head['machine']}, {head['cores']} cores, {o.device}; a training step of {o.model}, "
          f"B={o.batch}, T={o.time}\n# tok/s: median of {o.steps} steps after a first one, then over {o.rounds} rounds, "
          "in which the programs take turns\n# ratio: tok/s of train_gpt over the peer's of the same round; above 1, "
          "train_gpt is faster", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        programs = programs_of(o, folder)
        take_turns(programs, o.rounds)
    rows = results(programs)
    print_table(rows)
    if o.json:
        with open(o.json + ".tmp", "w") as f:
            json.dump(dict(head, precision=programs[0].precision, programs=rows), f, indent=1)
            f.write("\n")
        os.replace(o.json + ".tmp", o.json)
    noisy = any(row.get("too_noisy") for row in rows)
    return 1 if any(p.failed for p in programs) else 3 if noisy else 0


def check_writable(path):
    """The file is written last, after minutes: where it can't be, that is said first."""
    if not path or (os.path.lexists(path) and not os.path.isfile(path)):
        raise UserError(f"--json '{path}': is not the name of a file; want one, in a folder that is there")
    try:
        open(path + ".tmp", "w").close()
        os.remove(path + ".tmp")
    except OSError as e:
        raise UserError(f"--json '{path}': can't be written: {path}.tmp: {e.strerror}") from None


def options_of(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", metavar="PATH", help="train_gpt; default: the last that was built")
    p.add_argument("--program-fp32", metavar="PATH", help="an FP32 build of it, to be compared with llm.c")
    p.add_argument("--python", metavar="PATH", default=sys.executable, help="an interpreter that has torch; default: this")
    p.add_argument("--llmc", metavar="FOLDER", help="a checkout of llm.c, with its train_gpt2 built")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what train_gpt was built for")
    p.add_argument("--model", default="d12", help="as train_gpt's -e; default: d12, GPT-2 124M")
    p.add_argument("-b", "--batch", type=positive, default=4, help="sequences in a batch")
    p.add_argument("-t", "--time", type=positive, default=1024, help="tokens in a sequence")
    p.add_argument("--steps", type=positive, default=2, help="that count, of each program in each round")
    p.add_argument("--rounds", type=positive, default=3)
    p.add_argument("--json", metavar="FILE", help="write all figures there")
    o = p.parse_args(argv)
    o.program = os.path.abspath(o.program or os.path.join(ROOT, "train_gpt"))
    if not os.access(o.program, os.X_OK):
        raise UserError(f"--program {o.program}: no such program; run make")
    if o.llmc and not o.program_fp32:
        raise UserError("--llmc compares with an FP32 build: --program-fp32 PATH, or make bench-peers LLMC=FOLDER")
    if o.llmc and o.steps > LLMC_MOST_STEPS:
        raise UserError(f"--steps {o.steps}: llm.c's program makes {LLMC_MOST_STEPS} after its first")
    o.program_fp32 = os.path.abspath(o.program_fp32) if o.program_fp32 else None
    try:
        o.sizes = sizes_of(o.model)
    except argparse.ArgumentTypeError as e:
        raise UserError(f"--model {e}") from None
    if o.json is not None:
        check_writable(o.json)
    return o


def main(argv):
    try:
        return compare(options_of(argv))
    except (UserError, Failed, OSError, ImportError) as e:
        print(f"peers.py: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
