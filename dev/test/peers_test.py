#!/usr/bin/python3
"""dev/bench/peers/peers.py: turns, medians, ratios and what is said of peers that are not there, with stand-ins for the
programs that it runs: their rates are known. Once with train_gpt itself.
"""

import json, os, stat, sys

from program import PROGRAM, QUICK, Run, check, main, tmp

MODEL = "L=1,C=32,NH=4,V=256,maxT=64"
# a stand-in for train_gpt, an interpreter with torch, or llm.c's program, by its name. Each call is a line of `calls`;
# PLAN has, for each name, the ms of its steps in each round; the first step's is not to count
STUB = """#!/usr/bin/python3 -SE
import json, os, sys
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
plan = json.loads(os.environ["PLAN"])
if name == "python" and args[0] == "-c":
    print(plan["torch"]) if plan.get("torch") else sys.exit("Traceback\\nModuleNotFoundError: No module named torch")
    sys.exit(0)
if name == "python":
    name = "tp" if "torch_tp.py" in " ".join(args) else "compiled" if "--compile" in args else "eager"
calls = os.environ["CALLS"]
number = sum(json.loads(line)[0] == name for line in open(calls)) if os.path.exists(calls) else 0
open(calls, "a").write(json.dumps([name, args]) + "\\n")
ms = plan[name][number]
if name in ("eager", "compiled", "tp"):
    open(args[args.index("--json") + 1], "w").write(json.dumps(dict(tok_per_s=1e3 * 256 / ms[1])))
for i, x in enumerate(ms):
    if name == "train_gpt2":
        print("step %d: train loss 5.0 (took %f ms)" % (i, x))
    elif name.startswith("train_gpt"):
        print("| precision             | %s |" % ("FP32" if "32" in name else "BF16"))
        print("step %4d/9 | loss 5.0 (+nanz)| norm 1.0 (+nanz)| lr 3.00e-04 | %.2f ms | 1.0%% MFU | 9 tok/s" % (i + 1, x))
"""
COMPILES, OLD = '["9.9", true, 0]', '["1.13", false, 0]'
TURNS = ["train_gpt", "eager", "compiled", "train_gpt32", "train_gpt2"]


def executable(name, text):
    path = f"{tmp}/{name}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        f.write(text)
    os.chmod(path, stat.S_IRWXU)
    return path


def make_stubs():
    for name in ("stub/train_gpt", "stub/train_gpt32", "stub/python", "llmc/train_gpt2"):
        executable(name, STUB)


def peers(plan, *args, llmc=True, python=f"{tmp}/stub/python", program=f"{tmp}/stub/train_gpt", rounds=1, steps=1):
    """-> the run, the --json or None, the calls."""
    calls, figures = f"{tmp}/calls", f"{tmp}/peers.json"
    for path in (calls, figures):
        if os.path.exists(path):
            os.remove(path)
    args = [f"{os.getcwd()}/dev/bench/peers/peers.py", "--program", program, "--python", python, "--rounds", rounds,
            "--steps", steps, "--model", MODEL, "-b", 4, "-t", 64, "--json", figures, *args]
    if llmc:
        args += ["--llmc", f"{tmp}/llmc", "--program-fp32", f"{tmp}/stub/train_gpt32"]
    run = Run(command=[sys.executable, *map(str, args)], env={"PLAN": json.dumps(plan), "CALLS": calls}).wait(30)
    made = [json.loads(line) for line in open(calls)] if os.path.exists(calls) else []
    return run, json.load(open(figures)) if os.path.exists(figures) else None, made


def rows_of(figures):
    return {row["name"]: row for row in figures["programs"]}


def test_turns():
    # 256 tokens a step; train_gpt's first round is slower than its others
    plan = dict(torch=COMPILES, train_gpt=[[900, 12.5, 12.5], [900, 10, 10], [900, 10, 10]],
                eager=[[0, 20]] * 3, compiled=[[0, 15], [0, 14], [0, 8]], train_gpt32=[[900, 40, 42]] * 3,
                train_gpt2=[[900, 81, 83, 1, 1, 1]] * 3)
    run, figures, calls = peers(plan, rounds=3, steps=2)
    check(run.rc == 3, f"one ratio is too noisy: {run.rc}, {run.err}")
    check([name for name, _ in calls] == TURNS * 3, f"they take turns: {calls}")
    rows = rows_of(figures)
    check(len(rows) == 6 and figures["precision"] == "bf16" and figures["rounds"] == 3, f"all rows: {list(rows)}")
    ours, eager, compiled = rows["train_gpt"], rows["PyTorch 9.9"], rows["PyTorch 9.9 compiled"]
    check(ours["rate"] == dict(median=25600.0, lowest=20480.0, highest=25600.0), f"tok/s: {ours}")
    check(eager["ratio"] == dict(median=2.0, lowest=1.6, highest=2.0) and not eager["too_noisy"], f"round by round: {eager}")
    check(compiled["too_noisy"] and "too noisy" in run.out, f"0.8 to 1.4 is no ratio: {compiled}")
    llmc = rows["llm.c, fp32, B=4 T=64"]
    check(llmc["ratio"]["median"] == 2.0 and llmc["beside"] == "train_gpt, FP32, B=4 T=64", f"beside the FP32 build: {llmc}")
    line = next(x for x in run.out.split("\n") if x.startswith("PyTorch 9.9  "))
    check(line.split()[-2:] == ["2.00", "1.60..2.00"], f"in the table: {line}")
    given = {name: " ".join(args) for name, args in calls}
    check("--precision bf16 --model L=1,C=32,NH=4,V=256,maxT=64 -b 4 -t 64 --steps 3" in given["eager"], given["eager"])
    check("--compile" in given["compiled"] and "-x 3" in given["train_gpt"], "the same steps for each")


def test_missing():
    plan = dict(train_gpt=[[1, 10]])
    run, figures, _ = peers(plan, llmc=False)
    rows = rows_of(figures)
    check(run.rc == 0 and list(rows) == ["train_gpt", "PyTorch", "llm.c"], f"{run.rc}: {list(rows)}")
    check("No module named torch" in run.out and "scripts/deps.sh --bench" in run.out, f"how to install it: {run.out}")
    check("--llmc FOLDER" in rows["llm.c"]["missing"], f"how to get it: {rows['llm.c']}")
    run, figures, _ = peers(dict(plan, torch=OLD, eager=[[0, 20]]), llmc=False)
    rows = rows_of(figures)
    check("torch 1.13 has no torch.compile" in rows["PyTorch 1.13 compiled"]["missing"], f"no compiler: {rows}")
    check("at least 2 GPUs" in rows["PyTorch async TP"]["missing"], f"no GPU: {rows}")
    check(rows["PyTorch 1.13"]["ratio"]["median"] == 2.0, f"as it is: {rows}")


def test_gpus():
    plan = dict(torch='["9.9", true, 2]', train_gpt=[[1, 10], [1, 5]], eager=[[0, 20]], compiled=[[0, 15]], tp=[[0, 8]])
    run, figures, calls = peers(plan, "--device", "cuda", llmc=False)
    rows = rows_of(figures)
    check(run.rc == 0 and len(rows) == 5, f"{run.rc}, {run.err}: {list(rows)}")
    check(rows["PyTorch 9.9 async TP"]["ratio"]["median"] == 1.6, f"beside train_gpt --tp 2: {rows}")
    check("--tp 2" in " ".join(calls[3][1]) and "--nproc_per_node=2" in calls[4][1], f"on both GPUs: {calls[3:]}")
    run, figures, _ = peers(dict(plan, torch=COMPILES), "--device", "cuda", llmc=False)
    check("sees no GPU" in rows_of(figures)["PyTorch 9.9"]["missing"], f"none: {run.out}")


def test_failures():
    plan = dict(torch=OLD, train_gpt=[[1, 10]], eager=[], train_gpt32=[[1, 10]], train_gpt2=[[1]])
    run, figures, _ = peers(plan)
    rows = rows_of(figures)
    check(run.rc == 1 and "IndexError" in rows["PyTorch 1.13"]["missing"], f"a peer fails: {run.rc}, {rows}")
    check("after 1 steps, 2 wanted" in rows["llm.c, fp32, B=4 T=64"]["missing"], f"llm.c ends early: {rows}")
    check(rows["train_gpt"]["rate"]["median"] == 25600.0, "the others are there")
    os.mkfifo(f"{tmp}/pipe")
    for says, args, how in (
        ("train_gpt: ", (), dict(program=f"{tmp}/stub/python")),  # ours fails
        ("no such program", (), dict(program=f"{tmp}/none")),
        ("no program train_gpt2", ("--llmc", tmp, "--program-fp32", "x"), {}),
        ("--model d7", ("--model", "d7"), {}),
        ("--steps 41", ("--steps", 41), dict(llmc=True)),
        ("--program-fp32", ("--llmc", f"{tmp}/llmc"), {}),
        ("nowhere/x.json.tmp: No such file", ("--json", f"{tmp}/nowhere/x.json"), {}),
        (f"--json '{tmp}/llmc': is not the name of a file", ("--json", f"{tmp}/llmc"), {}),
        (f"--json '{tmp}/pipe'", ("--json", f"{tmp}/pipe"), {}),  # a device would be lost where this fails
        ("--json ''", ("--json", ""), {}),
    ):
        run, figures, calls = peers(dict(plan, torch=OLD), *args, **{"llmc": False, **how})
        lines = run.err.strip().split("\n")
        check(run.rc == 1 and len(lines) == 1 and says in run.err and figures is None, f"{says}: {run.rc}, {run.err}")
        check(not calls or says == "train_gpt: ", f"{says}: nothing is measured: {calls}")


def test_train_gpt():
    path = executable("real/train_gpt", f'#!/bin/sh\nexec "{PROGRAM}" "$@" {" ".join(QUICK)}\n')
    plan = dict(torch=OLD, eager=[[0, 20]], train_gpt2=[[9, 20]])
    run, figures, _ = peers(plan, "--llmc", f"{tmp}/llmc", "--program-fp32", path, program=path, llmc=False)
    check(run.rc == 0, f"{run.rc}: {run.err}")
    rows = rows_of(figures)
    for ours, theirs in (("train_gpt", "PyTorch 1.13"), ("train_gpt, FP32, B=4 T=64", "llm.c, fp32, B=4 T=64")):
        check(rows[theirs]["ratio"]["median"] == rows[ours]["tok_per_s"][0] / 12800 > 0, f"{ours}: {rows}")


main([test_turns, test_missing, test_gpus, test_failures, test_train_gpt], make_stubs)
