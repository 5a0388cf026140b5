#!/usr/bin/python3
"""--trace of the program: the file is what the step lines and --comm-report say of the same steps; threads and processes
have the same timeline; where it can't be written, one line says so; it changes nothing. ONLY=mesh runs test_mesh alone.
"""

import collections, json, os, re, signal

from program import MPI, Run, at_once, check, data, listing_names, main, refused, reported, same, succeeds, tmp, train

MODEL = "L=2,C=96,NH=6,V=256,maxT=64"
# so slow that what is exposed is not what the scheduler does
SLOW = ["--link", "0.02,50", "--pace", "0.01"]


def timed(*args, b=6, t=48, **how):
    args = list(args)
    for flag, value in (("-x", 4), ("--tp", 3), ("--overlap", "flash")):  # auto may choose another in each run
        if flag not in args:
            args += [flag, value]
    return Run(*data(), "-e", MODEL, "-v", 0, "-s", 0, "-b", b, "-t", t, *args, *SLOW, quick=False, **how)


class Timeline:
    """A file, checked for what holds in each: rank -> row name -> spans in order."""

    def __init__(self, name, ranks, generates=False):
        with open(f"{tmp}/{name}") as f:
            self.file = json.load(f)
        self.events, self.rows, names, self.ranks = self.file["traceEvents"], {}, {}, {}
        for e in self.events:
            if e["name"] == "process_name":
                self.ranks[e["pid"]] = e["args"]["name"]
            if e["name"] == "thread_name":
                names[e["pid"], e["tid"]] = e["args"]["name"]
        self.spans = [e for e in self.events if e["ph"] == "X"]
        for e in self.spans:
            self.rows.setdefault((e["pid"], names[e["pid"], e["tid"]]), []).append(e)
        check(sorted(self.ranks) == list(range(ranks)), f"{name}: a process for each of {ranks} ranks: {self.ranks}")
        check(len(names) == len(self.rows), f"{name}: a name for each row that has spans: {names}")
        check(not os.path.exists(f"{tmp}/{name}.tmp"), f"{name}: no temporary file is left")
        for (rank, row), spans in self.rows.items():
            where = f"{name}: rank {rank}, {row}"
            ends = [0.0] + [e["ts"] + e["dur"] for e in spans]
            late = [e for e, end in zip(spans, ends) if e["ts"] < end - 0.01]
            check(not late, f"{where}: spans in order, none over another: {late[:2]}")
            check(all(e["dur"] >= 0 for e in spans), f"{where}: no span of negative length")
            kinds = {"steps": {"step"}, "compute": {"compute", "exposed"}}.get(row, {"comm", "compute"})
            if generates:
                kinds |= {"comm"}
            check({e["cat"] for e in spans} <= kinds, f"{where}: categories {kinds}")
            work = self.rows[rank, "steps"]
            check(spans[0]["ts"] >= work[0]["ts"] - 1000, f"{where}: begins with its steps")
            if row == "compute":
                check(ends[-1] <= work[-1]["ts"] + work[-1]["dur"] + 1000, f"{where}: ends with its steps")

    def steps(self):
        return [e["name"] for e in self.rows[0, "steps"]]

    def sent(self):
        """{label: [[bytes, messages] of each rank]} as exchanges have it."""
        table = {}
        for e in self.spans:
            if e["cat"] == "comm":
                label = re.match(r"(.*?)( (to|from) .*)?$", e["name"]).group(1)
                row = table.setdefault(label, [[0, 0] for _ in self.ranks])[e["pid"]]
                row[0] += e["args"]["sent_bytes"]
                row[1] += len(e["args"]["to"])
                check(e["pid"] not in e["args"]["to"] + e["args"]["from"], f"a peer is another rank: {e}")
        return table

    def exposed_ms(self):
        return sum(e["dur"] for e in self.spans if e["cat"] == "exposed") / 1e3 / len(self.ranks)

    def names(self):
        """How often each operation comes in each row; not waits, which come as they must."""
        return collections.Counter((e["pid"], e["tid"], e["name"]) for e in self.spans if e["cat"] != "exposed")


def exposed_of(run, first, last):
    """What the step lines say."""
    ms = {int(n): float(x) for n, x in re.findall(r"step +(\d+)/.* exposed ([\d.]+) ms", run.out)}
    return sum(ms[n] for n in range(first, last + 1))


def same_bytes(timeline, run, what):
    """By operation and rank what --comm-report says of the step."""
    sent, report = timeline.sent(), reported(run.out)
    for label in set(sent) | set(report):
        got = [tuple(x) for x in sent.get(label, [(0, 0)] * len(timeline.ranks))]
        check(got == report.get(label), f"{what}: {label}: {got}, reported {report.get(label)}")
    check("exchange" not in sent and len(sent) > 1, f"{what}: each exchange has its label: {list(sent)}")


def waits_end_with_exchanges(timeline, what):
    """An exposed span ends when a message of its name is there."""
    ends, n, missed = collections.defaultdict(list), 0, []
    for e in timeline.spans:
        if e["cat"] == "comm":
            ends[e["pid"], e["name"].split(" to ")[0].split(" from ")[0]].append(e["ts"] + e["dur"])
    for e in timeline.spans:
        if e["cat"] == "exposed":
            end, n = e["ts"] + e["dur"], n + 1
            at = ends[e["pid"], e["name"][len("exposed "):]]
            if not any(abs(x - end) < 20 for x in at):
                missed.append(e)
    check(n > 0 and len(missed) <= n // 10, f"{what}: {len(missed)} of {n} waits end with no message: {missed[:2]}")


# ---- what is told --------------------------------------------------------------------------------------------
def test_told():
    """Exposed time, bytes, steps and links as the program prints them."""
    def one(name, first, last, *args):
        for _ in range(3):  # a step line has the waits of the update before, the timeline those of the step's own
            run = succeeds(timed("--trace", name, "--comm-report", "-x", last + 1, *args))
            timeline = Timeline(name, 3)
            printed, found = exposed_of(run, first, last), timeline.exposed_ms()
            if abs(found - printed) <= 0.05 * printed:
                break
        check(printed > 1 and abs(found - printed) <= 0.05 * printed, f"{name}: exposed {found} ms, printed {printed}")
        check(timeline.steps() == [f"step {n}" for n in range(first, last + 1)], f"{name}: {timeline.steps()}")
        check(re.search(rf"^timeline up to step {last}: {name}$", run.out, re.M), run.out)
        waits_end_with_exchanges(timeline, name)
        for e in timeline.spans:
            if e["cat"] == "comm":
                least = 50 + max(e["args"]["sent_bytes"], e["args"]["received_bytes"]) / 20e3
                check(e["dur"] >= least - 1 or len(e["args"]["to"]) > 1, f"{name}: the link takes {least} us: {e}")
            check(e["dur"] > 0 or e["cat"] != "exposed", f"a wait takes time: {e}")
            check("matmul" not in e["name"] or e["args"]["flops"] > 0, f"{name}: flops of {e}")
        if first == last:
            same_bytes(timeline, run, name)
        computes = {e["name"] for e in timeline.spans if e["cat"] == "compute"}
        for op in ("F1 matmul_forward", "F2 attention_forward", "F4 matmul_forward", "B1 matmul_dgrad", "adamw_update",
                   "B4 attention_backward", "B6 accumulate", "H1 matmul_forward", "matmul_wgrad", "layernorm_forward"):
            check(op in computes, f"{name}: {op} among {sorted(computes)}")

    at_once(lambda: one("flash.json", 2, 2), lambda: one("none.json", 2, 2, "--overlap", "none"),
            lambda: one("range.json", 3, 6, "--trace-steps", "3-6"),
            lambda: one("ring.json", 2, 2, "--topology", "ring", "--overlap", "slice:2"))
    single, four = (sum(Timeline(name, 3).names().values()) for name in ("flash.json", "range.json"))
    check(abs(four - 4 * single) < 0.1 * single, f"four steps are four times one: {single} spans, {four}")


def test_mesh():
    """Every group's row, with the bytes of --comm-report to the byte; ids and scalars, too."""
    def one(name, zero, *args):
        mesh = ["--dp", 2, "--up", 2, "--tp", 2]
        run = succeeds(timed("--trace", name, "--comm-report", "-x", 2, "-z", zero, *mesh, *args, b=2))
        timeline = Timeline(name, 8)
        same_bytes(timeline, run, name)
        rows = {row for _, row in timeline.rows}
        check(rows == {"steps", "compute", "comm tp", "comm up", "comm dp"}, f"{name}: rows {rows}")
        check(timeline.ranks[5] == "rank 5 (dp 1, up 0, tp 1)", timeline.ranks)
        labels = {"comm tp": "F1", "comm up": "U1", "comm dp": "D1"}
        for (rank, row), spans in timeline.rows.items():
            if row in labels:
                check(any(e["name"].startswith(labels[row] + " ") for e in spans), f"{labels[row]} in {row} of {rank}")
        peers = {e["args"]["to"][0] for e in timeline.rows[5, "comm dp"] if e["name"].startswith("D1 ")}
        check(peers == {1, 3, 7}, f"ranks of the world: D1 of rank 5 goes to {peers}")

    at_once(lambda: one("zero2.json", 2), lambda: one("zero0.json", 0, "--overlap", "flash:2"))


def test_processes():
    """Threads and processes have the same operations, in the same rows; one file, by one of them."""
    if not MPI:
        return
    for tp, dp in ((2, 1), (1, 2)):
        files = []
        for np in (0, 2):
            name = f"np{np}tp{tp}.json"
            run = succeeds(timed("--trace", name, "--tp", tp, "--dp", dp, "-z", dp - 1, np=np))
            files.append(Timeline(name, 2))
            check(files[-1].exposed_ms() > 0, f"{name}: exposed {files[-1].exposed_ms()} ms, {exposed_of(run, 2, 2)}")
        check(files[0].names() == files[1].names() and len(files[0].names()) > 50,
              f"tp {tp}: {files[0].names() - files[1].names()}, {files[1].names() - files[0].names()}")
        check(files[1].file["otherData"]["clocks_apart_us"] == 0, "processes of a machine share its clock")


# ---- when and where --------------------------------------------------------------------------------------------
def test_steps():
    """The second step, or the only one; a run that is stopped writes what it has; a resumed one says what is over."""
    succeeds(train("-x", 1, "--trace", "only.json", "-o", "one"))
    check(Timeline("only.json", 1).steps() == ["step 1"], "the only step")
    succeeds(train("-x", 5, "-y", 1, "-o", "one", "--trace", "more.json", "--tp", 2))
    check(Timeline("more.json", 2).steps() == ["step 3"], "the second of a resumed run")
    run = succeeds(train("-x", 7, "-y", 1, "-o", "one", "--trace", "over.json", "--trace-steps", "2-5"))
    check("note: --trace-steps 2-5 are done already" in run.out and not os.path.exists(f"{tmp}/over.json"), run.out)
    succeeds(train("-x", 9, "-y", 1, "-o", "one", "--trace", "part.json", "--trace-steps", "2-8"))
    check(Timeline("part.json", 1).steps() == ["step 8"], "what is left of the steps")
    run = train("-x", 100000, "--tp", 2, "--trace", "cut.json", "--trace-steps", "2-100000", "-v", 7, "-s", 9)
    run.wait_for("step   60/100000")
    run.process.send_signal(signal.SIGINT)
    run.wait()
    steps = Timeline("cut.json", 2, generates=True).steps()
    check(run.rc == 130 and len(steps) >= 59 and steps[0] == "step 2", f"stopped: {run.rc}, {steps}")
    check(f"timeline up to {steps[-1]}: cut.json" in run.out and f"stopped by signal 2 after {steps[-1]}\n" in run.out,
          run.out[-300:])
    check(os.path.getsize(f"{tmp}/cut.json") > 3 << 20, "a file of several blocks")


def test_off():
    """It changes no file, and is written only where asked for."""
    before = set(os.listdir(tmp))
    succeeds(train("-x", 3, "--tp", 2, "-o", "without"))
    check(set(os.listdir(tmp)) - before == {"without"}, "no timeline unless asked for")
    succeeds(train("-x", 3, "--tp", 2, "-o", "with", "--trace", "with.json", "--trace-steps", "1-3"))
    same("with", "without", "the same bits with a timeline")


def test_refused():
    refused("--trace ''|want FILE", "--trace", "")
    refused("--trace-steps '3-2'|3-5", "--trace", "x.json", "--trace-steps", "3-2")
    succeeds(train("-x", 2, "-o", "new", "--trace", "new/x.json"))  # the folder of -o is there by then
    check("x.json" in listing_names("new"), f"a timeline in the folder: {listing_names('new')}")
    refused("--trace: nowhere/x.json.tmp|No such file", "-x", 2, "--trace", "nowhere/x.json")
    refused("--trace: nowhere/x.json.tmp|No such file", "-x", 2, "--trace", "nowhere/x.json", "--tp", 2)
    os.mkfifo(f"{tmp}/fifo")
    refused("--trace: fifo|not a file", "-x", 2, "--trace", "fifo")
    refused("--trace: .|not a file", "-x", 2, "--trace", ".")
    refused("--trace-steps 2-4|the run has 3 steps", "-x", 3, "--trace", "x.json", "--trace-steps", "2-4")
    if MPI:
        refused("--trace: nowhere/x.json.tmp|No such file", "-x", 2, "--trace", "nowhere/x.json", "--tp", 2, np=2)
    check(not os.path.exists(f"{tmp}/x.json") and not os.path.exists(f"{tmp}/x.json.tmp"), "nothing is left")
    with open(f"{tmp}/old.json", "w") as f:
        f.write("old")
    run = train("-x", 3, "--tp", 2, "--trace", "old.json", most_file=1 << 12).wait()  # a full disk
    check(run.rc == 1 and len(run.err.splitlines()) == 1 and "--trace: old.json can't be written" in run.err,
          f"{run.rc}: {run.err}")
    with open(f"{tmp}/old.json") as f:
        check(f.read() == "old" and not os.path.exists(f"{tmp}/old.json.tmp"), "the file before is left as it was")
    succeeds(train("-x", 2, "--trace", "old.json"))
    Timeline("old.json", 1)


if __name__ == "__main__":  # cuda_test.py uses Timeline
    main([test_told, test_mesh, test_processes, test_steps, test_off, test_refused])
