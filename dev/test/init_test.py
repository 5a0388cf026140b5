"""How processes of a run find each other without MPI: by rank 0's port or a folder. The program then writes what
threads and MPI's processes write, bit for bit; who does not come, comes twice, was told otherwise, is no rank at all or
ends too soon is told in one line, and nothing hangs.
"""

import random, socket, struct

from program import *

TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
TRAIN = ["-x", 3, "-l", "1e-3", "--timeout", 20]


def free_port():
    """One that is free now, below those that outgoing connections are given."""
    while True:
        with socket.socket() as s:
            try:
                s.bind(("", random.randrange(12000, 30000)))
                return s.getsockname()[1]
            except OSError:
                continue


def variables(rank, n, port):
    """What torchrun tells a process, on one machine."""
    return dict(zip(TORCHRUN, map(str, (rank, n, rank, "127.0.0.1", port))))


def by_flags(rank, n, port):
    return ["-pn", n, "-pr", rank, "-ps", "localhost", "--port", port]


def by_folder(rank, n, name):
    os.makedirs(f"{tmp}/{name}", exist_ok=True)
    return ["-pi", "fs", "-pn", n, "-pr", rank, "-pf", name]


def succeed(runs):
    for run in runs:
        run.wait()
    check(all(run.rc == 0 and run.err == "" for run in runs), f"{[(run.rc, run.err) for run in runs]}")
    return runs


def says(run, *parts, limit=30):
    """It has ended by itself with one line that has these parts."""
    run.wait(limit)
    check(run.rc == 1 and run.err.count("\n") == 1, f"exit status {run.rc}, one line: {run.name}: {run.err}")
    for part in parts:
        check(part in run.err, f"'{part}' in: {run.err}")
    return run


# ---- the same files ------------------------------------------------------------------------------------------
MESH = ["--dp", 2, "--tp", 2, "-b", 2, "-z", 2]


def test_same():
    succeeds(train(*TRAIN, *MESH, "-o", "threads"))
    port = free_port()
    succeed([train(*TRAIN, *MESH, "-o", "tcp", env=variables(r, 4, port)) for r in (3, 1, 0, 2)])
    same("threads", "tcp", "tcp")
    runs = [train(*TRAIN, *MESH, "-o", "fs", *by_folder(r, 4, "meet")) for r in range(4)]
    succeed(runs)
    same("threads", "fs", "fs")
    check("as processes" in runs[0].out and runs[1].out == "", f"rank 0 speaks: {runs[1].out}")
    check(listing_names("meet") == [], f"nothing is left: {listing_names('meet')}")
    if MPI:
        succeeds(train(*TRAIN, *MESH, "-o", "mpi", "-pi", "mpi", "-pn", 4, "-pr", 0, "-pg", 8, np=4))
        same("threads", "mpi", "mpi")
    check(losses("threads") == losses("tcp") == losses("fs"), "losses")


def test_port():
    """torchrun's own store has the port that it names: then rank 0 takes the next one."""
    for port in iter(free_port, None):
        try:
            with socket.create_server(("127.0.0.1", port + 1)):
                break
        except OSError:
            continue
    with socket.create_server(("127.0.0.1", port)):
        succeed([train("-x", 1, "--tp", 2, env={**variables(r, 2, port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
                 for r in range(2)])
    succeed([train("-x", 1, "--tp", 2, *by_flags(r, 2, port)) for r in range(2)])


# ---- who does not come, or is none of us ---------------------------------------------------------------------
def test_absent():
    port, busy, silent = free_port(), socket.socket(socket.AF_INET6), socket.create_server(("127.0.0.1", 0))
    busy.bind(("::", 0))
    busy.listen()
    ports = [s.getsockname()[1] for s in (busy, silent)]
    quick = ["--tp", 2, "--timeout", 1]
    os.makedirs(f"{tmp}/empty")
    for run, *parts in [
            (train(*quick, *by_flags(0, 2, port)), f"rank 0 waited 1 s for rank 1 of 2 (at port {port} of"),
            (train(*quick, *by_flags(1, 2, port + 1)), f"rank 1 waited 1 s for rank 0 at localhost port {port + 1}: Conn"),
            (train(*quick, *by_folder(0, 2, "alone")), "rank 0 waited 1 s for rank 1 of 2 (alone/rank0.address says port"),
            (train(*quick, *by_folder(1, 2, "empty")),
             "rank 1 waited 1 s for rank 0 by empty/rank0.address: rank 0 has not written it"),
            (train(*quick, "-pi", "fs", "-pn", 2, "-pr", 1, "-pf", "nowhere"), "-pf nowhere: rank 1 finds no such folder"),
            (train(*quick, "-ps", "no.such.host.invalid", "-pn", 2, "-pr", 1),
             "rank 1 waited 1 s for rank 0 at no.such.host.invalid port 12345: "),
            (train(*quick, *by_flags(1, 2, ports[1])), "another program answers there, or nothing does"),
            (train(*quick, *by_flags(0, 2, ports[0])), f"rank 0 can't listen at port {ports[0]}: ", "--port")]:
        says(run, *parts)
    check(listing_names("alone") == listing_names("empty") == [], "no file is left")
    runs = [train("--tp", 4, "--timeout", 2, *by_flags(r, 4, port)) for r in (0, 2)]
    says(runs[0], f"rank 0 waited 2 s for ranks 1, 3 of 4 (at port {port} of")
    says(runs[1], "rank 2 ends, for rank 0 says: rank 0 waited 2 s for ranks 1, 3 of 4")
    for killed, left, part in ((1, 0, "rank 1 on"), (0, 1, "rank 1 has lost rank 0 at localhost port")):
        port = free_port()
        runs = [train("--tp", 3, *by_flags(r, 3, port)) for r in (0, 1)]
        listens(port)
        time.sleep(0.5)
        runs[killed].process.kill()
        runs[killed].wait()
        says(runs[left], part, "before all had come")


def test_differ():
    """Ranks that were not told the same: all end at once, with the same line."""
    for first, second, parts in (
            (["-pn", 2, "-pr", 0], ["-pn", 3, "-pr", 1, "--dp", 3], ("rank 1 on", "one of 3 processes, rank 0 as one of 2")),
            (["-pn", 3, "-pr", 0], ["-pn", 3, "-pr", 1], ("two processes were started as rank 1",)),
            (["-pn", 2, "-pr", 0], ["-pn", 2, "-pr", 1, "-l", "0.5"], ("other options", "there --lr 0.5, here nothing")),
            (["-pn", 2, "-pr", 0, "-l", 0.1], ["-pn", 2, "-pr", 1, "-l", "0.5"], ("there --lr 0.5, here --lr 0.1",)),
            (["-pn", 2, "-pr", 0, "-pg", 1], ["-pn", 2, "-pr", 1, "-pg", 1], ("-pg 1: 2 processes are on", "-pg 2"))):
        port, start = free_port(), time.time()
        args = ["-t", 32, "--port", port, "--timeout", 20]
        runs = [train(*args, *how) for how in ((first, second, second) if "two" in parts[0] else (first, second))]
        says(runs[0], *parts)
        for run in runs[1:]:
            says(run, "ends, for rank 0 says: ", *parts)
        check(time.time() - start < 25, f"at once: {time.time() - start:.1f} s: {parts}")


def test_told():
    """What is wrong is seen before anybody waits; of processes of a launcher one tells it, none opens a transport."""
    for args, part in ((["-pn", 4], "-pn 4 needs the number of this process: -pr 0 to 3"),
                       (["-pn", 2, "-pr", 2], "-pr 2: there are 2 processes (-pn); want 0 to 1"),
                       (["-pi", "fs", "-pn", 2, "-pr", 0], "-pi fs needs a folder"), (["-pi", "nccl"], "auto|mpi|tcp|fs"),
                       (["-pf", "x" * 300, "-pn", 2, "-pr", 0], "--init-folder: is too long"),
                       (["--port", 70000], "want 0 to 65535"),
                       (["-pn", 2, "-pr", 0, "--tp", 3], "2 processes were started")):
        says(train(*args), part)
    for said, part in ((("x", 2, 1), "RANK is 'x'; want the number of this process, 0 to 1"),
                       ((0, 2, "x"), "port 0: want 1 to 65535")):
        says(train(env=variables(*said)), part)
    runs = [Run("--help", env=variables(r, 2, 1)) for r in (0, 1)]
    check([len(run.wait().out) > 1000 for run in runs] == [True, False], "one of two prints the help")
    check(runs[0].rc == runs[1].rc == 0 and runs[0].err == runs[1].err == "", f"{runs[0].err} {runs[1].err}")
    if MPI:
        run = Run("--help", np=2).wait()
        check(run.rc == 0 and run.err == "" and run.out.count("usage:") == 1, f"once: {run.rc} {run.err}")
        run = train("-pn", 3, np=2).wait()
        check(run.rc != 0 and run.err.count("-pn 3: mpirun has started 2 processes") == 1, f"{run.rc} {run.err}")


def strangers(port):
    """What others may send to a port: nothing, nonsense, the beginning of a right message, too much of it."""
    hello = b"fohello\0" + struct.pack("<I", 1)
    sockets = []
    for text in [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100000), hello, hello[:9], hello + os.urandom(50000),
                 b"fohello\0" + struct.pack("<I", 7), b"fohello\0" + struct.pack("<I", 2) + bytes(200)] * 12:
        s = socket.create_connection(("127.0.0.1", port))
        s.settimeout(1)
        try:
            s.sendall(text)
        except OSError:
            pass
        sockets.append(s)
    return sockets


def hello(nonce, n=2, rank=1, build=0, host=b"far", options=b"", magic=b"fohello"):
    """What a process that joins says first (FoHello)."""
    return struct.pack("<8sIiiiIIQQQ48s1024s", magic, 1, n, rank, 0, build, 1, 0, nonce, 0, host, options)


def joins(port, **changes):
    """A stranger that speaks our language; returns what rank 0 answers."""
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.settimeout(10)
        magic, nonce = struct.unpack("<8sQ", s.recv(16, socket.MSG_WAITALL))
        check(magic == b"fogreet\0", magic)
        s.sendall(hello(changes.pop("nonce", nonce), **changes))
        try:
            return s.makefile("rb").read()
        except ConnectionResetError:
            return b""


def listens(port):
    end = time.time() + 20
    while time.time() < end:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.01)


def test_strangers():
    port = free_port()
    zero = train(*TRAIN, "--tp", 2, "-o", "strange", *by_flags(0, 2, port))
    listens(port)
    sockets = strangers(port)
    check(joins(port, nonce=1) == b"", "of an earlier run: sent away")
    check(joins(port, magic=b"fohellO") == b"", "of another language: sent away")
    one = train(*TRAIN, "--tp", 2, "-o", "strange", *by_flags(1, 2, port))
    succeed([zero, one])
    check(zero.peak_mib < 400, f"{zero.peak_mib:.0f} MiB")
    for s in sockets:
        s.close()
    for text in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"fogreet\0" + bytes(8) + b"foreply\0" + b"\xff" * 2000):
        with socket.create_server(("127.0.0.1", 0)) as server:  # and what may answer where rank 0 should
            def answer():
                while True:
                    try:
                        client = server.accept()[0]
                        client.sendall(text)
                    except OSError:
                        return

            threading.Thread(target=answer, daemon=True).start()
            run = train("--tp", 2, "--timeout", 1, *by_flags(1, 2, server.getsockname()[1]))
            says(run, "rank 0")
            server.shutdown(socket.SHUT_RDWR)


def test_joins():
    for part, changes in (("rank 1 on far is another program than rank 0", {"host": b"far"}),
                          ("rank 1 on " + "f" * 47 + " is another program", {"host": b"f" * 48, "options": b"x" * 1024}),
                          ("rank 1 on f??r? is another program", {"host": b"f\x1b\xffr\n"[:-1] + b"\x07"}),
                          ("a process on far was started as rank -5; want 1 to 1", {"rank": -5}),
                          ("a process on far was started as rank 2147483647; want", {"rank": 2147483647}),
                          ("rank 1 on far was started as one of -1 processes, rank 0 as one of 2", {"n": -1})):
        port = free_port()
        zero = train("--tp", 2, *by_flags(0, 2, port))
        listens(port)
        told = joins(port, **changes)
        check(told[:8] == b"foreply\0" and part.encode() in told, f"{part}: {told}")
        says(zero, part)


# ---- stale files ---------------------------------------------------------------------------------------------
def test_stale():
    def killed(n):
        """A run whose rank 0 is killed while it waits, in whose folder its file is then left."""
        run = train("--tp", n, *by_folder(0, n, "stale"))
        end = time.time() + 20
        while listing_names("stale") != ["rank0.address"] and time.time() < end:
            time.sleep(0.01)
        run.process.kill()
        run.wait()
        check(listing_names("stale") == ["rank0.address"], "a file is left")
        return read("stale/rank0.address")

    def meets(what):
        one = train("-x", 1, "--tp", 2, *by_folder(1, 2, "stale"))
        time.sleep(0.3)  # it has read what is there
        check(not one.ended(), f"{what}: rank 1 waits: {one.text(1)}")
        succeed([one, train("-x", 1, "--tp", 2, *by_folder(0, 2, "stale"))])
        check(listing_names("stale") == [], f"{what}: nothing is left: {listing_names('stale')}")

    killed(2)
    meets("of as many ranks")
    old = killed(3)
    meets("of another number of ranks")
    for what, text in (("empty", b""), ("nonsense", os.urandom(5000)), ("cut short", old[:20])):
        write("stale/rank0.address", text)
        meets(what)
    with socket.create_server(("127.0.0.1", 0)) as other:  # its port is another program's by now
        words = old.split()
        words[3] = str(other.getsockname()[1]).encode()
        write("stale/rank0.address", b" ".join(words[:4]) + b"\n127.0.0.1\n")
        meets("of another program's port")
    port = free_port()  # or that of another run's rank 0, which is not ours
    others = [train("-x", 1, "--tp", 2, *by_flags(0, 2, port))]
    listens(port)
    words[3] = str(port).encode()
    write("stale/rank0.address", b" ".join(words[:4]) + b"\n127.0.0.1\n")
    meets("of another run's port")
    succeed(others + [train("-x", 1, "--tp", 2, *by_flags(1, 2, port))])
    first = train("-x", 1, "--tp", 2, *by_folder(0, 2, "stale"))
    while listing_names("stale") != ["rank0.address"] and not first.ended():
        time.sleep(0.01)
    says(train("-x", 1, "--tp", 2, *by_folder(0, 2, "stale")), "-pf stale: another rank 0 is waiting there")
    succeed([first, train("-x", 1, "--tp", 2, *by_folder(1, 2, "stale"))])


# ---- one that ends -------------------------------------------------------------------------------------------
def test_ends():
    port = free_port()
    runs = [train("-x", 1000000, "--dp", 3, *by_flags(r, 3, port)) for r in range(3)]
    runs[0].wait_for("step    3/")
    os.kill(runs[2].process.pid, signal.SIGSTOP)  # it will see that two others have ended, and which was the first
    runs[1].process.kill()
    start = time.time()
    says(runs[0], "[rank 0] rank 1 on", "has ended")
    os.kill(runs[2].process.pid, signal.SIGCONT)
    says(runs[2], "[rank 2] rank 1 on", "has ended")
    runs[1].wait()
    check(time.time() - start < 20, f"{time.time() - start:.1f} s after a rank was killed")
    # its own message is seen, and whose it is: a loss that is not finite ends rank 0 with its line
    port = free_port()
    runs = [train("-x", 1000, "--dp", 2, "-l", "1e3", *by_flags(r, 2, port)) for r in range(2)]
    runs[0].wait()
    check(runs[0].rc == 1 and "the loss is" in runs[0].err.splitlines()[-1], f"{runs[0].rc} {runs[0].err}")
    says(runs[1], "[rank 1] rank 0 on", "has ended", "what it said tells why")
    # frozen: the other says for whom it waits
    port = free_port()
    runs = [train("-x", 1000000, "--dp", 2, "--timeout", 2, *by_flags(r, 2, port)) for r in range(2)]
    runs[0].wait_for("step    3/")
    os.kill(runs[1].process.pid, signal.SIGSTOP)
    start = time.time()
    runs[0].wait()
    check(runs[0].rc == 1 and re.search(r"\[rank 0\].* \w+: waited 2.0 s for rank 1 to .* bytes.* \(step \d+\)", runs[0].err),
          f"who waits for whom: {runs[0].err}")
    check(time.time() - start < 25, f"{time.time() - start:.1f} s after a rank was frozen")
    os.kill(runs[1].process.pid, signal.SIGCONT)
    says(runs[1], "[rank 1] rank 0 on", "has ended")
    # SIGTERM to all, as launchers end them: the step is finished, a checkpoint written
    port = free_port()
    runs = [train("-x", 1000000, "--dp", 2, "-o", "stopped", *by_flags(r, 2, port)) for r in range(2)]
    runs[0].wait_for("step    3/")
    for run in runs:
        run.process.terminate()
    for run in runs:
        run.wait()
    check(runs[0].rc == 128 + signal.SIGTERM and len(steps("stopped")) == 1, f"{runs[0].rc} {runs[0].err}")
    # started with standard streams closed: sockets and files don't get their numbers, nor the text
    port = free_port()
    runs = [train("-x", 3, "--dp", 2, "-o", "closed", *by_flags(r, 2, port), shell="<&- >&- 2>&-") for r in range(2)]
    for run in runs:
        check(run.wait().rc == 0, f"{run.rc}: streams closed")
    check(len(steps("closed")) == 1, "streams closed: a checkpoint")
    # and while it waits for the others it ends at once
    run = train("--dp", 2, *by_flags(0, 2, port))
    listens(port)
    run.process.terminate()
    check(run.wait(5).rc == -signal.SIGTERM, f"{run.rc}")


if DEVICE != "cpu":
    sys.exit("init_test.py: B is the folder of a build of DEVICE=cpu")
main([test_same, test_port, test_absent, test_differ, test_told, test_strangers, test_joins, test_stale, test_ends])
