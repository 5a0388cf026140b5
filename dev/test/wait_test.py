"""A process that hears nothing from another ends the run, and says for whom it waited, in which operation and step:
exchanges and barriers that a rank never comes to, and a rank of a training run that freezes. So does one that is sent
more or fewer bytes than it expects."""

from program import *

CASES = os.path.join(os.path.dirname(PROGRAM), "dev/test/test_comm_mpi")


def dies(run, *texts):
    run.wait()
    check(run.rc not in (0, None), f"exit status {run.rc}: {run.name}")
    for text in texts:
        check(re.search(text, run.err), f"'{text}' in: {run.err}")


def test_refused():
    run = train("-x", 1, "--timeout", 0, quick=False).wait()
    check(run.rc == 1 and run.err.count("\n") == 1 and "--timeout '0'" in run.err, f"{run.rc}: {run.err}")


def test_never():
    for case, text in ((0, r"\[rank 0\].* F1: waited 0.5 s for rank 2 to send 4096 bytes \(step 12\)"),
                       (1, r"\[rank 0\].* F1: waited 0.5 s for rank 1 to receive 4096 bytes \(step 12\)"),
                       (2, r"\[rank [12]\].* waited 0.5 s at a barrier")):
        run = Run(command=["mpirun", "--oversubscribe", "-np", "3", CASES, str(case)])
        dies(run, text)
        check(run.seconds < 25, f"{run.seconds:.1f} s: {run.name}")


def test_sizes_differ():
    for case, sent, expected in ((3, 300000, 100), (4, 100, 300000)):
        run = Run(command=["mpirun", "--oversubscribe", "-np", "2", CASES, str(case)])
        dies(run, rf"\[rank 1\].* rank 0 sends {sent} bytes to rank 1, which expects {expected}")


def freeze(*args, awaited):
    run = train("-x", 1000000, "--tp", 2, "--timeout", 2, *args, np=2, quick=False)
    run.wait_for("step    4/")
    ranks = run.ranks()
    os.kill(ranks[1], signal.SIGSTOP)
    frozen = time.time()
    dies(run, rf"\[rank 0\].* \w+: waited 2.0 s for {awaited}.* \(step \d+\)")
    check(time.time() - frozen < 25, f"{time.time() - frozen:.1f} s after the freeze")


def test_frozen():
    freeze(awaited="rank 1 to .* bytes")
    if not os.path.basename(os.path.dirname(PROGRAM)).startswith("cpu"):
        freeze("--graph", 1, awaited="(the other ranks|rank 1)")


main((test_refused, test_never, test_sizes_differ, test_frozen) if MPI else (test_refused,))
