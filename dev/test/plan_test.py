#!/usr/bin/python3
"""--plan: what it predicts is what the formulas say where those hold, and what a paced run measures; its timeline, and what
dev/plot_timeline.py takes out of one; bad machines.
"""

import json, os, random, re, subprocess, sys, types

from program import DEVICE, PROGRAM, Run, check, main, shard, succeeds, tmp, write

sys.path.insert(0, "dev")
import plot_timeline

# a machine on which only matmuls and messages take time
PLAIN = """peak_tflops 1
gemm_tflops 1
attention_tflops 1
memory_gbytes_s 1000000
memory_gib 1000
node_ranks 1024
link_gbytes_s {link}
link_us {us}
node_link_gbytes_s {link}
node_link_us {us}
link_shared 0
"""
MODEL = "L=2,C=256,NH=8,V=256,maxT=256"


def machine(name, text):
    return write(name, text.encode())


def table(out, head):
    """The rows below the line that begins with head: name -> numbers."""
    rows, lines = {}, out.split("\n")
    for line in lines[next(i for i, l in enumerate(lines) if l.startswith(head)) + 1:]:
        if not line.strip():
            break
        name, *numbers = re.split(r"\s{2,}", line.strip())
        rows[name] = [float(n.rstrip("%")) for n in numbers if re.fullmatch(r"-?[0-9.]+%?", n)]
    return rows


def plan(*args):
    return succeeds(Run("--plan", *args, quick=False)).out


def formula(mode, m, P, shard, work):
    T = (P - 1) * shard
    if mode == "none":
        return T
    if mode == "slice":
        return T / m + (m - 1) / m * max(0.0, T - work)
    return max(0.0, T - (P - 1 / m) * work / P)


def in_turn(mode, m, P, shard, work, between):
    """F1 and F2 take turns by flash, shard by shard: between is the other one's."""
    if mode != "flash":
        return formula(mode, m, P, shard, work)
    return max(formula(mode, m, 2, shard, 2 * work / P), (P - 1) * shard - (P - 1 / m) * work / P - (P - 2) * between / P)


def near(a, b, relative, absolute):
    return abs(a - b) <= max(absolute, relative * abs(b))


def test_formulas():
    """The forward pass of 2 layers; N rows, links that hide and that do not."""
    E = 4 if "FP32" in os.environ.get("B", "") else 2
    B, T, C = 8, 256, 256
    for P in (2, 4, 8):
        for link, us in ((0.5, 0), (2.0, 0), (20.0, 0), (2.0, 300)):
            out = plan(machine("plain", PLAIN.format(link=link, us=us)), "-e", MODEL, "-b", B, "-t", T, "--tp", P)
            exposed = table(out, "exposed by operation")
            columns = [("none", 1), ("slice", 4), ("slice", 8), ("flash", 1), ("flash", 2)]
            qkv, fc = (2 * B * T * C * OC / P / 1e12 for OC in (3 * C, 4 * C))
            attention = 2 * B * T * C * (T + 1 + C) / P / 1e12 # with its projection
            for name, work, between in (("F1", qkv, attention), ("F2", attention, qkv), ("F3", fc, 0), ("F4", fc, 0)):
                for k, (mode, m) in enumerate(columns):
                    if name == "F2" and (mode != "flash" or m * P > B):
                        continue # slices leave attention out, and later queries of a sequence cost more
                    each = B * T * C * E / P / (link * 1e9) + m * us * 1e-6
                    want = 2e3 * in_turn(mode, m, P, each, work, between)
                    if name == "F2": # the link has F1's messages, too
                        want = max(want, 2e3 * (2 * (P - 1) * each - qkv - attention - in_turn(mode, m, P, each, qkv, attention)))
                    got = exposed.get(name, [0.0] * 5)[k]
                    check(near(got, want, 0.02, 0.005), f"{name} {mode}:{m} P={P} link {link},{us}: {got}, formula {want}")


def measure(args, mode, link, us, pace, tokens):
    """Least exposed time of steps after the first, and its communication, in ms."""
    run = succeeds(Run("-i", tokens, "-j", tokens, *args, "-x", 3, "-v", 0, "-s", 0, "--overlap", mode, "--link",
                       f"{link},{us}", "--pace", pace, quick=False))
    steps = re.findall(r"comm ([0-9.]+) ms exposed ([0-9.]+) ms", run.out)
    check(len(steps) == 3, f"three steps: {run.name}")
    return min((float(exposed), float(comm)) for comm, exposed in steps[1:])


def test_measured():
    """A paced run on an emulated link exposes what was predicted."""
    P, link, us, pace = 2, 0.0125, 20, 0.0005
    args = ["-e", MODEL.replace("L=2", "L=1"), "-b", 2, "-t", 128, "--tp", P]
    text = PLAIN.format(link=link, us=us).replace("tflops 1\n", f"tflops {pace}\n")
    text = text.replace("memory_gbytes_s 1000000", "memory_gbytes_s 4")
    predicted = table(plan(machine("paced", text), *args), "overlap")
    draw = random.Random(1)
    tokens = shard("tokens.bin", [draw.randrange(256) for _ in range(4096)])  # as the prediction's
    for mode in ("none", "slice:4", "flash:1"):
        _, comm, exposed, *_ = predicted[mode]
        for _ in range(4):  # others on the machine make a step late
            got, all_of_it = measure(args, mode, link, us, pace, tokens)
            if abs(got - exposed) <= max(1.0, 0.05 * comm):
                break
        check(near(comm, all_of_it, 0.02, 0.1), f"{mode}: comm {all_of_it} ms, predicted {comm}")
        check(abs(got - exposed) <= max(1.0, 0.05 * comm), f"{mode}: exposed {got} of {comm} ms, predicted {exposed}")


def test_meshes():
    """Of 64 ranks the fastest first, each of 64; more than fit a machine's memory are left out."""
    small = PLAIN.replace("memory_gib 1000", "memory_gib 2").format(link=50, us=5)
    out = plan(machine("small", small), "-e", "d12", "-b", 4, "-t", 1024, "-d", 1 << 19, "--world", 64)
    rows = [line.split() for line in out.split("GiB a rank\n")[1].strip().split("\n")]
    times = [float(r[5]) for r in rows]
    check(len(rows) >= 4 and times == sorted(times), f"the fastest first: {times}")
    check(all(int(r[0]) * int(r[1]) * int(r[2]) == 64 for r in rows), f"meshes of 64: {rows}")
    check(all(float(r[9]) <= 2.0 for r in rows), f"each fits: {rows}")
    check(re.search(r"[1-9][0-9]* of them need more memory", out), "some need more memory")
    one, two, five = (table(plan("small", "-e", MODEL, "-b", 4, "-t", 256, "--dp", 4, "-d", n * 4096), "overlap")["flash:1"][0]
                      for n in (1, 2, 5))
    check(two > 1.3 * one and near(five - two, 3 * (two - one), 0.02, 0.01), f"1, 2 and 5 micro-steps: {one} {two} {five} ms")
    run = succeeds(Run("--plan", "small", "-e", "gpt3:c4096", "-b", 1, "-t", 2048, "-d", 1 << 21, "-r", 3, "--world", 1024,
                       quick=False))
    check(run.seconds < 30, f"1,024 ranks in {run.seconds:.1f} s")


def refuses(says, function, *args):
    try:
        function(*args)
        check(False, f"refused: {args}")
    except plot_timeline.UserError as e:
        check(says in str(e), f"'{says}' is said: {e}")


def test_timeline():
    """The timeline of a simulated step has the exposed time of the table; what the plot takes is all of it."""
    for mode in ("none", "slice:4", "flash:1"):
        out = plan(machine("slow", PLAIN.format(link=0.5, us=5)), "-e", MODEL, "-b", 8, "-t", 256, "--tp", 4,
                   "--overlap", mode, "--trace", "t.json")
        step, _, exposed, *_ = table(out, "overlap")[mode]
        length, rows = plot_timeline.read(f"{tmp}/t.json", 0, None)
        drawn = sum(s[1] for s in rows["compute"] if s[3] == "exposed")
        check(near(length, step, 1e-3, 0.001), f"{mode}: {length} ms drawn of {step}")
        check(near(drawn, exposed, 0.02, 0.02), f"{mode}: exposed {drawn} ms drawn of {exposed}")
        check({"F1", "F4", "B6"} <= {s[2] for s in rows["comm tp"]}, f"{mode}: names {rows.keys()}")
        start, end = plot_timeline.window_of(rows, "F4", 2.0, length)
        first = min(s[0] for spans in rows.values() for s in spans if s[2] == "F4")
        check(near(start, first, 0, 1e-9) and near(end, first + 2, 0, 1e-9), f"{mode}: the first F4: {start} {end}")
    compute = [(0, 1, "F1", "exposed"), (1, 2, "F1", "compute"), (3, 0.01, "layernorm_forward", "compute"),
               (3.01, 0.5, "F2", "compute"), (3.51, 0.2, "F1", "compute"), (3.71, 0.3, "F2", "compute"), # shard by shard
               (4.01, 0.5, "F4", "compute"), (4.51, 0.5, "F4", "compute"), (5.01, 1, "F4", "exposed"), (6.01, 1, "F1", "exposed"),
               (9, 1, "F1", "exposed")]
    runs = [(a, b, name) for a, b, name, _ in plot_timeline.runs_of(compute)]
    check(runs == [(0, 1, "F1"), (1, 3, "F1"), (3.01, 3.51, "F2"), (3.51, 3.71, "F1"), (3.71, 4.01, "F2"), (4.01, 5.01, "F4"),
                   (5.01, 6.01, "F4"), (6.01, 7.01, "F1"), (9, 10, "F1")],
          f"named: {runs}")
    waits = plot_timeline.waits_of(compute)
    check(waits == [[0, 1], [5.01, 7.01], [9, 10]], f"waits that follow each other are one: {waits}")
    check(plot_timeline.next_time({"compute": compute}, "F1") == 6.01, "the next layer")
    check(plot_timeline.next_time({"compute": compute}, "F4") is None, "none")
    check(plot_timeline.next_time({"compute": compute[:7]}, "F1") is None, "the same layer, in turn with F2")
    hidden = {"compute": compute, "comm tp": [(2, 1, "B2", "comm")]}
    check(plot_timeline.next_time(hidden, "B2") is None, "on the links alone: none")
    refuses("no such operation", plot_timeline.window_of, rows, "F9", 2.0, length)
    refuses("no step of rank 3", plot_timeline.read, f"{tmp}/t.json", 3, None)
    refuses("no step 7", plot_timeline.read, f"{tmp}/t.json", 0, 7)
    refuses("no timeline", plot_timeline.read, f"{tmp}/slow", 0, None)
    with open(f"{tmp}/t.json") as f:
        events = json.load(f)["traceEvents"]
    span = next(e for e in events if e["ph"] == "X")
    for event, says in ((7, "'name': 7"), ([], "'name': []"), ({}, "'name'"), ({**span, "name": None}, "'name'"),
                        ({**span, "dur": "1"}, "'dur'"), ({k: v for k, v in span.items() if k != "cat"}, "'cat'"),
                        ({**span, "tid": 99}, "row 99 of rank 0 has no name"),
                        ({**span, "name": "thread_name", "args": 7}, "'args'")):
        write("odd.json", json.dumps({"traceEvents": [*events, event]}).encode())
        refuses(says, plot_timeline.read, f"{tmp}/odd.json", 0, None)
    write("odd.json", b'{"traceEvents": 7}')
    refuses("no timeline", plot_timeline.read, f"{tmp}/odd.json", 0, None)
    run = subprocess.run([sys.executable, "dev/plot_timeline.py", f"{tmp}/slow", "-o", f"{tmp}/x.png"], capture_output=True, text=True)
    check(run.returncode == 1 and run.stderr.count("\n") == 1 and not os.path.exists(f"{tmp}/x.png"), f"one line: {run.stderr}")
    run = Run("--plan", "slow", "-e", MODEL, "-t", 128, "--trace", "none/t.json", quick=False).wait()
    check(run.rc == 1 and "--trace" in run.err and not run.out, f"before anything: {run.rc}: {run.err}{run.out}")


def test_bad():
    plain = PLAIN.format(link=1, us=1)
    cases = [
        ("nothing", None, "cannot be opened"),
        ("unknown", plain + "colour 3\n", "'colour' is no key"),
        ("missing", plain.replace("link_us 1\n", "", 1), "link_us is missing"),
        ("twice", plain + "peak_tflops 2\n", "is there twice"),
        ("word", plain.replace("gemm_tflops 1", "gemm_tflops fast"), "gemm_tflops 'fast'"),
        ("nan", plain.replace("gemm_tflops 1", "gemm_tflops nan"), "gemm_tflops 'nan'"),
        ("zero", plain.replace("gemm_tflops 1", "gemm_tflops 0"), "want a number of"),
        ("trailing", plain.replace("link_us 1", "link_us 1 us"), "link_us '1 us'"),
        ("long", "# " + "x" * 600 + "\n" + plain, "characters at most"),
        ("empty", "", "is missing"),
        (".", None, "Is a directory"),
    ]
    for name, text, says in cases:
        if text is not None:
            machine(name, text)
        run = Run("--plan", name, "-e", MODEL, "-t", 128, quick=False).wait()
        check(run.rc == 1 and run.err.count("\n") == 1 and says in run.err, f"{name}: exit status {run.rc}: {run.err}")
    machine("good", plain)
    run = Run("--plan", "good", "-e", MODEL, "-t", 128, quick=False, shell=">/dev/full").wait()
    check(run.rc == 1 and "No space left" in run.err, f"the text is lost: exit status {run.rc}: {run.err}")
    for args, says in ((["--tp", 16], "heads"), (["--generate"], "want one of them"), (["-t", 4096], "positions")):
        args += [] if "-t" in args else ["-t", 128]
        run = Run("--plan", "good", "-e", MODEL, *args, quick=False).wait()
        check(run.rc == 1 and says in run.err, f"{args}: exit status {run.rc}: {run.err}")


def test_scripts():
    """Every preset is one; what the scripts of scaling read of --plan; what they refuse."""
    sys.path.insert(0, "dev/sim")
    from common import UserError, output_of, plan as modes_of, replace_range
    presets = [f"{os.getcwd()}/dev/sim/hardware/{f}" for f in os.listdir("dev/sim/hardware")]
    check(any(p.endswith("/cpu.txt") for p in presets), f"this CPU is one: {presets}")
    for preset in presets:
        modes = modes_of(PROGRAM, preset, ["-e", MODEL, "-b", "4", "-t", "128", "--tp", "2"])
        check({"none", "slice:4", "flash:1"} <= set(modes) and all(p["step_ms"] > 0 and p["mfu"] <= 100 for p in modes.values()),
              f"{preset}: {modes}")
    machine("tiny", PLAIN.replace("memory_gib 1000", "memory_gib 0.001").format(link=1, us=1))
    modes = modes_of(PROGRAM, f"{tmp}/tiny", ["-e", MODEL, "-t", "128"])
    check(modes and all("gib" in p for p in modes.values()), f"needs more memory: {modes}")
    write("doc.md", b"a\n<!-- x -->\nold\n<!-- end of x -->\nb\n")
    replace_range(f"{tmp}/doc.md", "x", "new\n")
    with open(f"{tmp}/doc.md") as f:
        check(f.read() == "a\n<!-- x -->\nnew\n<!-- end of x -->\nb\n", "the range alone is replaced")
    for function, args in ((replace_range, (f"{tmp}/doc.md", "y", "")), (output_of, (["false"],))):
        try:
            function(*args)
            check(False, f"refused: {args}")
        except UserError as e:
            check("\n" not in str(e), f"one line: {e}")
    for command in (["measure.py", "-o", f"{tmp}/m.txt", "--rows", "7"], ["check_scaling.py", "--ranks", "3"],
                    ["check_scaling.py", "--meshes", "pp"], ["check_scaling.py", "--steps", "3"]):
        run = subprocess.run([sys.executable, f"dev/sim/{command[0]}", *command[1:]], capture_output=True, text=True)
        check(run.returncode in (1, 2) and run.stderr.count("\n") == 1 and ("want" in run.stderr or "none of" in run.stderr),
              f"{command}: {run.returncode} {run.stderr}")
    check(not os.path.exists(f"{tmp}/m.txt"), "nothing was written")


def test_hosts():
    """Where dev/cluster.sh can't make hosts, check_scaling.py takes threads; what else it says is an error, and not
    hidden by what it says when there is nothing to remove."""
    sys.path.insert(0, "dev/sim")
    import check_scaling
    from common import UserError
    args = types.SimpleNamespace(ranks=[2, 4], gbit=0.5, build="B", no_hosts=None)
    check_scaling.CLUSTER = f"{tmp}/cluster.sh"
    for status, down, says in ((77, 77, None), (1, 1, "up 2 --gbit 0.5: exit status 1: up says"), (0, 1, "down says")):
        write("cluster.sh", f"echo $1 says >&2; [ $1 = down ] && exit {down}; exit {status}".encode())
        try:
            why = check_scaling.why_no_hosts(args)
            check(says is None and why == "up says", f"no hosts: {why}")
        except UserError as e:
            check(says and says in str(e), f"'{says}' is said: {e}")
    write("cluster.sh", b"exit 0")
    check(check_scaling.why_no_hosts(args) is None, "there are hosts")
    check(check_scaling.ranks_of("train_gpt", args, "-x")[:2] == ["bash", f"{tmp}/cluster.sh"], "processes on them")
    args.no_hosts = "up says"
    check(check_scaling.ranks_of("train_gpt", args, "-x") == ["B/train_gpt", "-x"], "one process, of threads")
    row = dict(P=2, mesh="tp 2", mode="none", median=1, low=1, high=1, predicted=1, ratio=1, verdict="ok")
    for no_hosts, says in (("up says", "No hosts: up says. Ranks are threads"), (None, "Ranks are processes on hosts")):
        args = types.SimpleNamespace(steps=4, gbit=0.5, pace=1, no_hosts=no_hosts)
        check(says in check_scaling.markdown([row], ["a machine"], args), f"the table says: {says}")


if __name__ == "__main__":
    main([test_formulas, test_meshes, test_timeline, test_bad, test_scripts, test_hosts] +
         [test_measured] * (DEVICE == "cpu"))
