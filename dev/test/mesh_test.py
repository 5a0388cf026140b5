#!/usr/bin/python3
"""Runs the program on meshes of dp x up x tp ranks, as a user would: every mesh trains the same model; modes, ZeRO
stages, recomputation and transports write the same files; any mesh goes on from any other's checkpoint; what is sent is
what the formulas say, to the byte; bad meshes are refused in one line. ONLY=formulas runs test_formulas alone.
"""

import array, os, re, shutil, signal, sys, time

from program import (MPI, PROGRAM, Run, at_once, check, close, data, losses, main, read, refused, reported, same, shard,
                     steps, succeeds, tmp, train, write)

sys.dont_write_bytecode = True
sys.path.insert(0, "dev")  # program has gone to the root
import checkpoint

T, SEQUENCES = 48, 12
MODEL = "L=2,C=48,NH=12,V=200,maxT=64"


def mesh_args(dp, up, tp):
    return ["--dp", dp, "--up", up, "--tp", tp, "-b", SEQUENCES // dp, "-t", T]


def run_mesh(mesh, *args, np=0, model=MODEL, **how):
    """Every step, and every mesh, has the same 12 sequences: a shard with one sample can't be shuffled."""
    files = ["-i", "one.bin"] + ([] if "-j" in args else ["-j", "one.bin"])
    return train(*files, *mesh_args(*mesh), *args, np=np, model=model, **how)


def make_one():
    state, tokens = 7, []
    for _ in range(SEQUENCES * T + 1):
        state = state * 1103515245 + 12345 & 0x7fffffff
        tokens.append((state >> 16) % (200 if state >> 10 & 1 else 20))
    shard("one.bin", tokens)
    return tokens


# ---- the same model ----------------------------------------------------------------------------------------
def meshes():
    return [(dp, up, tp) for dp in (1, 2, 3, 4) for up in (1, 2, 3, 4) for tp in (1, 2, 3, 4)
            if dp * up * tp <= 16 and T % (2 * up * tp) == 0]


def test_meshes():
    """The losses of every mesh differ from one rank's by rounding alone."""
    name = "m{}{}{}".format
    at_once(*(lambda m=m: succeeds(run_mesh(m, "-x", 4, "-l", "1e-3", "-z", sum(m) % 3, "-o", name(*m)))
              for m in meshes()))
    check(losses("m111")[0] - losses("m111")[3] > 0.05, f"it learns: {losses('m111')}")
    for m in meshes():
        close(losses("m111"), losses(name(*m)), 2e-3, f"losses on mesh {m}")


def test_same_files():
    """Overlap, ZeRO, recomputation, sequence parallelism and transport change no bit of a mesh's checkpoint."""
    for mesh in ((2, 2, 2), (4, 1, 1), (1, 4, 1), (1, 2, 3)):
        name = "b{}{}{}".format(*mesh)
        ways = [("--overlap", o, "-z", z, "-r", r, "--keep-gathered", k) for o, z, r, k in (
            ("slice:2", 1, 0, 0), ("slice:4", 2, 1, 0), ("flash", 0, 2, 1), ("flash:2", 1, 3, 0), ("flash:2", 2, 1, 1),
            ("none", 2, 3, 0), ("flash", 1, 1, 0))]
        succeeds(run_mesh(mesh, "-x", 2, "--overlap", "none", "-o", name))
        at_once(*(lambda w=w, i=i: succeeds(run_mesh(mesh, "-x", 2, *w, "-o", f"{name}{i}"))
                  for i, w in enumerate(ways)))
        for i, way in enumerate(ways):
            same(name, f"{name}{i}", f"{mesh} {way}")
        for z in (0, 1):  # on a link so slow that what is not waited for is not there
            succeeds(run_mesh(mesh, "-x", 3, "-z", z, "--link", "0.02,500", "--pace", 1000, "-o", f"{name}slow{z}",
                              quick=False), 120)
        succeeds(run_mesh(mesh, "-x", 3, "--overlap", "none", "-o", f"{name}three"))
        for z in (0, 1):
            same(f"{name}three", f"{name}slow{z}", f"{mesh} -z {z} on a slow link")
    if MPI:
        for mesh, np in (((2, 2, 2), 8), ((4, 1, 1), 4), ((1, 4, 1), 4)):
            name = "b{}{}{}".format(*mesh)
            run = succeeds(run_mesh(mesh, "-x", 2, "-z", 1, "-o", f"{name}np", np=np), 120)
            check(run.out.count("step    1/2 ") == 1, f"one process prints: {run.out}")
            same(name, f"{name}np", f"{np} processes")
        # as llm.c's users start it: the number of processes is dp
        succeeds(train("-i", "one.bin", "-j", "one.bin", "-x", 2, "-b", 3, "-t", T, "-o", "auto", np=4, model=MODEL))
        same("b411", "auto", "mpirun alone")


def test_accumulation():
    """Micro-steps on every stage: 4 sequences at a time make the same step as 12."""
    def one(name, mesh, b, *args):
        succeeds(train("-i", "many_train*", "-j", "many_val*", "--dp", mesh[0], "--up", mesh[1], "--tp", mesh[2],
                       "-b", b, "-t", 16, "-d", 256, "-x", 3, "-l", "1e-3", "-o", name, *args,
                       model="L=2,C=32,NH=4,V=256,maxT=64"))

    for zero in (0, 1, 2):
        at_once(lambda: one(f"acc{zero}", (2, 1, 1), 2, "-z", zero), lambda: one(f"up{zero}", (1, 2, 2), 4, "-z", zero))
    same("acc0", "acc1", "ZeRO 0 and 1 with micro-steps")
    same("up0", "up1", "ZeRO 0 and 1 with micro-steps on up x tp")
    close(losses("acc0"), losses("acc2"), 2e-3, "ZeRO 2 with micro-steps")
    close(losses("up0"), losses("up2"), 2e-3, "ZeRO 2 with micro-steps on up x tp")


def test_skipped():
    """A step that is skipped changes no weight and no stage of ZeRO stumbles over it, nor what comes between steps."""
    shard("noise.bin", [i * i * 2654435761 % 4294967291 % 199 for i in range(20000)])

    def one(mesh, zero):
        name = "k{}{}{}z{}".format(*mesh, zero)
        run = succeeds(train("-i", "noise.bin", "-j", "noise.bin", "--dp", mesh[0], "--up", mesh[1], "--tp", mesh[2],
                             "-b", 1, "-t", 8, "-x", 138, "-z", zero, "-l", "1e-3", "-sl", "0.1", "-sg", "0.1", "-v", 1,
                             "-m", 1, "-s", 1, "-g", 3, "-n", 4, "-nk", 2, "-o", name,
                             model="L=1,C=24,NH=4,V=200,maxT=64"))
        vals = re.findall(r"val loss (\S+)|(skipping)", run.out)
        skips = [i for i, (_, skipped) in enumerate(vals) if skipped]
        check(len(skips) > 1 and all(vals[i - 1] == vals[i + 1] for i in skips), f"{name}: the same model: {vals[-16:]}")

    meshes = ((1, 1, 1), (2, 1, 1), (1, 2, 2))
    at_once(*(lambda m=m, z=z: one(m, z) for m in meshes for z in ((0, 1, 2) if m[0] * m[1] > 1 else (0,))))
    for m in meshes[1:]:
        for zero in (1, 2):
            same("k{}{}{}z0".format(*m), "k{}{}{}z{}".format(*m, zero), f"{m}: skipped updates, ZeRO {zero}")


def test_validation():
    """The loss of all validation data is the same on every mesh."""
    shard("check.bin", [(i * i * 3 + i) % 97 for i in range(5 * SEQUENCES * T + 1)])
    found = {}

    def one(mesh):
        run = succeeds(run_mesh(mesh, "-j", "check.bin", "-x", 2, "-l", "1e-3", "-v", 1, "-m", -1))
        found[mesh] = [float(x) for x in re.findall(r"val loss (\S+)", run.out)]

    all_meshes = [(1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3), (2, 2, 2), (4, 1, 3)]
    at_once(*(lambda m=m: one(m) for m in all_meshes))
    check(len(set(found[1, 1, 1])) == 3, f"it changes: {found}")
    for m in all_meshes:
        close(found[1, 1, 1], found[m], 1e-3, f"validation on mesh {m}")


# ---- checkpoints -------------------------------------------------------------------------------------------
def test_elastic():
    """4 steps on one mesh, 4 on another: bit for bit on the same one, within rounding on any."""
    all_meshes = [((4, 1, 1), 1), ((2, 1, 2), 2), ((1, 2, 2), 1), ((1, 1, 1), 0), ((2, 3, 1), 2), ((1, 1, 4), 0)]
    name = "e{}{}{}".format

    def whole(mesh, zero):
        succeeds(run_mesh(mesh, "-x", 8, "-n", 4, "-z", zero, "-l", "1e-3", "-c", "0.1", "-o", name(*mesh)))

    at_once(*(lambda m=m: whole(*m) for m in all_meshes))
    jobs = []
    for i, (mesh, _) in enumerate(all_meshes):
        for k in (0, 1, 3):  # on itself, and two others
            to, zero = all_meshes[(i + k) % len(all_meshes)]
            folder = f"{name(*mesh)}to{name(*to)}"
            os.mkdir(f"{tmp}/{folder}")
            for f in os.listdir(f"{tmp}/{name(*mesh)}"):
                if f == "main.log" or "00000004" in f:
                    shutil.copy(f"{tmp}/{name(*mesh)}/{f}", f"{tmp}/{folder}/{f}")
            jobs.append((mesh, to, zero, folder))

    def resume(mesh, to, zero, folder):
        run = succeeds(run_mesh(to, "-x", 8, "-n", 4, "-z", zero, "-l", "1e-3", "-c", "0.1", "-y", 1, "-o", folder))
        check("resuming at step 4" in run.out and steps(folder) == [4, 8], f"{folder}: {run.out[-300:]}")

    at_once(*(lambda j=j: resume(*j) for j in jobs))
    for mesh, to, _, folder in jobs:
        if mesh == to:
            same(name(*mesh), folder, folder)
        close(losses(name(*mesh))[4:], losses(folder)[-4:], 2e-3, folder)


def test_llmc():
    """A step that llm.c's ranks have left goes on as the same step of our own does, bit for bit, on every mesh."""
    args = ["-l", "1e-3", "-c", "0.1", "-o"]
    succeeds(run_mesh((2, 1, 1), "-x", 4, *args, "ours"))
    config, step, arrays = checkpoint.read_optimizer(f"{tmp}/ours/state_00000004.bin")
    for nproc, zero in ((1, 0), (2, 0), (4, 1)):
        folder = f"{tmp}/llmc{nproc}"
        os.mkdir(folder)
        shutil.copy(f"{tmp}/ours/model_00000004.bin", folder)
        checkpoint.write_llmc_states(folder, step, config, arrays, nproc=nproc, zero=zero)

    def one(mesh, zero):
        for start in ("ours", "llmc1", "llmc2", "llmc4"):
            name = "{}{}{}{}".format(start, *mesh)
            shutil.copytree(f"{tmp}/{start}", f"{tmp}/{name}")
            run = succeeds(run_mesh(mesh, "-x", 7, "-z", zero, "-y", 1, *args, name))
            notes = re.findall(r"note: step 4 .* was written by (\d) ranks? of llm.c", run.out)
            check(notes == ([start[4:]] if start != "ours" else []), f"{name}: told once: {run.out[:300]}")
        for start in ("llmc1", "llmc2", "llmc4"):
            models = [read("{}{}{}{}/model_00000007.bin".format(x, *mesh)) for x in ("ours", start)]
            check(models[0] == models[1], f"{start} on mesh {mesh}: the same model after 3 steps")

    at_once(*(lambda m=m, z=z: one(m, z) for m, z in (((1, 1, 1), 0), ((2, 1, 2), 1), ((1, 2, 1), 2), ((2, 2, 3), 2))))
    os.remove(f"{tmp}/llmc4/state_00000004_00002.bin")
    refused("--resume 1|step 4|state_00000004_00002.bin", "-x", 7, "-y", 1, *mesh_args(2, 2, 1), "-o", "llmc4", model=MODEL,
            folder="llmc4")


# ---- what is sent ------------------------------------------------------------------------------------------
def cut(n, P, p):
    return n // P * p + min(p, n % P)


def part(n, P, p):
    return cut(n, P, p + 1) - cut(n, P, p)


def up_to(n, unit):
    return -(-n // unit) * unit


class Formulas:
    """Bytes and messages that rank `rank` sends in a step, operation by operation: DESIGN.md section 5 with this
    program's wires (bf16 activations and partial sums, fp32 gradients)."""

    def __init__(self, mesh, rank, L, C, NH, V, maxT, B, tokens, accum=1, m=1, zero=0, recompute=1):
        self.sent = {}
        dp, up, tp = mesh
        t, p = rank % tp, rank // tp
        u, d, R, hs = p % up, p // up, dp * up, C // NH
        N, Vp = B * T, up_to(V, 128)
        Nt = N // up
        n = Nt // tp
        heads = part(NH, tp, t)
        widths = [part(heads, up, j) * hs for j in range(up)]
        Ca, Cu, F, Vl = heads * hs, widths[u], part(4 * C, tp, t), part(Vp, tp, t)
        layers = L * accum
        shards = (tp - 1) * n
        # -r 3 computes all layers but the last once more; then there is nothing to gather again
        forward = layers + (L - 1) * accum * (recompute == 3)
        for op in ("F1", "F2", "F3", "F4", "B1", "B2", "B3", "B4", "B5", "B6"):
            times = forward if op in ("F1", "F2", "F3") else layers * (recompute != 3 or op not in ("B2", "B5"))
            self.add(op, times * shards * C * 2, times * (tp - 1) * m)
        self.add("H1", accum * shards * C * 2)
        self.add("H2", accum * (tp - 1) * Nt * 12)
        self.add("H3", accum * shards * C * 2)
        # all-to-alls: what others have of mine, or mine of theirs
        self.add("U1", forward * Nt * 3 * (Ca - Cu) * 2)
        self.add("U2", forward * (up - 1) * Nt * Cu * 2)
        self.add("U3", layers * Nt * (Ca - Cu) * 2)
        self.add("U4 dk dv", layers * (up - 1) * Nt * 2 * Cu * 2, layers * (up - 1))
        self.add("U4 dq", layers * (up - 1) * Nt * Cu * 2, layers * (up - 1))
        # weights, by units: rows of an owner
        units = [(F, C), (C, F)] + [(C, w) for w in widths]
        units += [(3 * Ca, C)] if up == 1 else [x for w in widths for x in ((w, C), (2 * w, C))]
        pushes = accum if zero == 2 else 1
        away = sum((rows - part(rows, R, p)) * cols for rows, cols in units)
        own = sum(part(rows, R, p) * cols for rows, cols in units)
        own_wte = part(Vl, R, p) * C
        if R > 1:
            self.add("D1", pushes * L * away * 4)
            self.add("D2", pushes * (Vl * C - own_wte) * 4, pushes * (R - 1))
            self.add("D3", (L * own + own_wte) * (R - 1) * (2 if zero else 4))
            told = accum if zero == 2 else 2 if zero == 1 and accum > 1 else 1  # for D3's rows, and for D2's
            self.add("ids", told * (dp - 1) * N * 4, told * (dp - 1))
        # vectors: fp32, there and back
        aligned = [up_to(x, 64) for x in (maxT * C, *[L * C] * 6, C, C)]
        replicated = up_to(sum(aligned), tp)
        vectors = up_to(up_to(L * 3 * Ca, 64) + up_to(L * F, 64) + replicated // tp, R)
        self.add("B7", 2 * (tp - 1) * replicated // tp * 4, 2 * (tp - 1))
        self.add("B7 dp", 2 * (R - 1) * vectors // R * 4, 2 * (R - 1))
        self.add("scalars", (dp * up * tp - 1) * 48, dp * up * tp - 1)
        self.embedding(tokens, dp, up, tp, d, u, t, p, B, C, Vp, zero)
        self.add("other", 0, 0)

    def add(self, op, nbytes, nmessages=None):
        self.sent[op] = (nbytes, nmessages)

    def embedding(self, tokens, dp, up, tp, d, u, t, p, B, C, Vp, zero):
        """Rows of the tokens that others have, or own: every rank knows all tokens."""
        P = up * tp
        zigzag = up > 1 or B % tp != 0
        rows = [[None] * (B * T) for _ in range(dp)]
        for e in range(dp):
            for b in range(B):
                for s in range(T):
                    row = b * T + s
                    if zigzag:
                        block, k = T // (2 * P), s // (T // (2 * P))
                        shard_, second = (k, 0) if k < P else (2 * P - 1 - k, block)
                        row = shard_ * B * 2 * block + b * 2 * block + second + s % block
                    rows[e][row] = tokens[(e * B + b) * T + s]
        owner = lambda id: next(q for q in range(tp) if id < cut(Vp, tp, q + 1))
        Nt, R = B * T // up, dp * up
        n = Nt // tp
        mine = rows[d][u * Nt:(u + 1) * Nt]
        gives = sum(owner(id) == t for q in range(tp) if q != t for id in mine[q * n:(q + 1) * n])
        needs = sum(owner(id) != t for id in mine[t * n:(t + 1) * n])
        self.add("E1", gives * C * 2)
        self.add("E2", needs * C * 2)
        v0, Vl = cut(Vp, tp, t), part(Vp, tp, t)
        first, end = cut(Vl, R, p), cut(Vl, R, p + 1)
        away = {id - v0 for id in mine if 0 <= id - v0 < Vl and not first <= id - v0 < end}
        self.add("D2 rows", len(away) * C * 4 if R > 1 else 0)
        wanted = [{id for id in rows[q // up][q % up * Nt:(q % up + 1) * Nt] if first <= id - v0 < end}
                  for q in range(R) if q != p]
        self.add("D3 rows", sum(len(x) for x in wanted) * C * 2 if zero else 0)


def test_formulas():
    """Every byte of a step: no operation sends more or less than its formula, none is forgotten."""
    tokens = array.array("H", read("one.bin")[1024:]).tolist()
    cases = [((1, 1, 3), 1, 0, 1, "flash"), ((1, 1, 4), 1, 0, 3, "flash:2"), ((1, 3, 1), 1, 1, 1, "none"),
             ((1, 4, 1), 1, 0, 2, "flash:2"), ((4, 1, 1), 1, 0, 1, "flash"), ((3, 1, 1), 1, 1, 1, "slice:2"),
             ((2, 1, 1), 2, 2, 1, "flash"), ((2, 1, 1), 2, 1, 1, "flash"), ((2, 2, 2), 1, 1, 1, "flash"), ((2, 2, 2), 1, 2, 2, "flash:2"),
             ((1, 2, 3), 1, 1, 1, "flash"), ((3, 1, 2), 1, 2, 0, "none")]

    def one(mesh, accum, zero, recompute, overlap):
        args = ["-x", 2, "-z", zero, "-r", recompute, "--overlap", overlap, "--comm-report"]
        B = SEQUENCES // mesh[0] // accum
        if accum == 1:
            run = succeeds(run_mesh(mesh, *args))
        else:  # rows of the embedding are those of the last micro-step: the same tokens in each
            shard("two.bin", tokens[:B * mesh[0] * T + 1])
            run = succeeds(train("-i", "two.bin", "-j", "two.bin", "--dp", mesh[0], "--up", mesh[1], "--tp", mesh[2],
                                 "-b", B, "-t", T, "-d", B * T * mesh[0] * accum, *args, model=MODEL))
        got, m = reported(run.out), int(overlap.split(":")[1]) if ":" in overlap else 1
        for rank in range(mesh[0] * mesh[1] * mesh[2]):
            want = Formulas(mesh, rank, 2, 48, 12, 200, 64, B, tokens, accum, m, zero, recompute).sent
            for op, (nbytes, nmessages) in want.items():
                if op in ("E1", "E2") or (op == "D2 rows" and accum > 1 and zero == 2):
                    nbytes *= accum
                where = f"{mesh} -z {zero} -r {recompute} {overlap}: {op} of rank {rank}"
                check(op in got or nbytes == 0, f"{where} is reported")
                if op in got:
                    check(got[op][rank][0] == nbytes, f"{where}: {got[op][rank][0]} bytes, formula {nbytes}")
                    check(nmessages in (None, got[op][rank][1]), f"{where}: {got[op][rank][1]} messages, {nmessages}")
            extra = [op for op in got if op not in want and got[op][rank] != (0, 0)]
            check(not extra, f"{mesh}: operations without a formula: {extra}")

    at_once(*(lambda c=c: one(*c) for c in cases))


# ---- memory ------------------------------------------------------------------------------------------------
def activations(run):
    return [int(x) for x in re.findall(r"memory of rank \d+: .*, (\d+) MiB for activations", run.out)]


def dry(*args, model="L=8,C=256,NH=8,V=4096,maxT=16384"):
    return succeeds(Run(*data(), "-e", model, "--dry-run", *args, quick=False))


def test_memory():
    """up and recomputation give memory back; a long sequence trains; 1,024 ranks are planned in seconds."""
    long = ["-b", 1, "-t", 16384]
    by_up = [max(activations(dry(*long, "--up", up, model="L=24,C=256,NH=8,V=4096,maxT=16384"))) for up in (1, 2, 4)]
    for i in (1, 2):  # what is left beside 1/up: gradients of positions on their way
        ratio = by_up[i] * 2 ** i / by_up[0]
        check(0.8 < ratio < 1.3, f"activations at up {2 ** i}: {by_up}")
    by_level = [max(activations(dry("-b", 4, "-t", 1024, "-r", r, "--tp", 2))) for r in (0, 1, 2, 3)]
    check(by_level == sorted(by_level, reverse=True) and by_level[3] < 0.5 * by_level[0], f"-r 0 to 3: {by_level}")
    optimizer = []
    for zero in (0, 1, 2):
        text = dry("-b", 1, "-t", 256, "--dp", 4, "-z", zero, model="L=8,C=256,NH=8,V=4096,maxT=256").out
        found = re.search(r"rank 0: .* (\d+) MiB for gr.* (\d+) MiB for Adam", text)
        optimizer.append([int(x) for x in found.groups()])
    check(optimizer[1][1] * 3.6 < optimizer[0][1] and optimizer[1][0] == optimizer[0][0], f"ZeRO 1: {optimizer}")
    check(optimizer[2][0] * 3 < optimizer[0][0] and optimizer[2][1] == optimizer[1][1], f"ZeRO 2: {optimizer}")
    run = dry("-b", 1, "-t", 96, "--tp", 3, model="L=2,C=200,NH=25,V=1000,maxT=96")
    each = [float(x) for x in re.findall(r"rank \d: .*in all (\S+) MiB", run.out)]
    most = re.search(r"memory of rank (\d), which needs most of 3 ranks: .*in all (\S+) MiB", run.out)
    check(each[int(most.group(1))] == float(most.group(2)) == max(each) > min(each), f"the most of {each}: {most.group()}")
    for np in (0, 2) if MPI else (0,):  # 3 TB: no machine has them
        run = refused("needs|MiB (parameters|its device has|is too much: a smaller", "-x", 1, "-t", 16, "--tp", 2, np=np,
                      model="gpt3:c12288")
        check(run.out.startswith("memory of rank 0, which needs most of 2 ranks: "), f"said before: {run.out[:300]}")
    start = time.time()
    run = dry("--world", 1024, "--up", 2, "--tp", 8, "-b", 8, "-t", 1024, "-z", 1, model="gpt2:d48")
    check(time.time() - start < 20, f"1,024 ranks: {time.time() - start:.1f} s")
    check("1024 ranks" in run.out and "D1 128 ranks" in run.out, run.out[-600:])
    run = Run("-i", "long.bin", "-j", "long.bin", "-e", "L=1,C=16,NH=4,V=200,maxT=16384", "-b", 1, "-t", 16384,
              "--up", 4, "-x", 1, "-v", 0, "-s", 0, "-r", 3, quick=True)
    succeeds(run, 120)
    check(re.search(r"step +1/1 . loss 5\.\d+", run.out), f"T=16384 at up 4: {run.out[-200:]}")


def make_long():
    shard("long.bin", [i * i % 199 for i in range(16385)])


# ---- bad input ---------------------------------------------------------------------------------------------
def test_bad_meshes():
    def bad(says, *args, **how):
        refused(says, "-x", 1, *args, model=how.pop("model", MODEL), **how)

    bad("--up 5|T=48|2*up*tp=10|-t 40", "--up", 5, "-t", 48)
    bad("--up 4|T=50|-t 48", "--up", 4, "-t", 50)
    bad("--up 13|12 heads", "--up", 13, "-t", 52)
    bad("--up 4 * --tp 4|12 heads", "--up", 4, "--tp", 4, "-t", 32)
    bad("--dp 5|--up 2|20 ranks|16", "--dp", 5, "--up", 2, "--tp", 2)
    bad("--total-batch 128|--dp 4|256", "--dp", 4, "-d", 128)
    bad("--world 4|--dry-run", "--world", 4)
    bad("-z '3'", "-z", 3)
    bad("-r '4'", "-r", 4)
    bad("4 processes|577|", "-i", "one.bin", "-j", "one.bin", "--dp", 4, "-b", 4, "-t", T)
    if MPI:
        bad("3 processes were started|--up 2|want 2", "--up", 2, np=3)
        bad("asked for 2 ranks|3 processes", "--dp", 2, np=3)
    folder = "halved"
    succeeds(run_mesh((2, 1, 2), "-x", 2, "-z", 1, "-o", folder))
    for tp, model in ((1, "L=2,C=48,NH=12,V=200,maxT=65"), (2, "d12")):
        refused(f"-e {model}|model_00000002.bin, L=2,C=48,NH=12,V=200,maxT=64", "-x", 4, "-y", 1, "--dp", 2, "--tp", tp,
                "-b", 2, "-t", T, "-o", folder, model=model, folder=folder)
    os.remove(f"{tmp}/{folder}/state_00000002.bin")
    refused("--resume 1|step 2|state_00000002.bin", "-x", 4, "-y", 1, *mesh_args(4, 1, 1), "-o", folder, model=MODEL,
            folder=folder)


def test_bad_data():
    """A token that is none, in the data of one dp rank: all end with its line, and at once."""
    tokens = [i % 7 for i in range(161)]
    shard("sound.bin", tokens)
    shard("damaged.bin", [250 if i % 16 == 12 else x for i, x in enumerate(tokens)])  # rank 1's half of each sample
    training, validating = ["-i", "damaged.bin", "-j", "sound.bin"], ["-i", "sound.bin", "-j", "damaged.bin", "-v", 1]
    for files, mesh, np in ((training, ["--dp", 2], 0), (training, ["--dp", 2, "--up", 2, "-z", 2], 4),
                            (validating, ["--dp", 2, "--tp", 2], 4)):
        if np and not MPI:
            continue
        run = refused("token 250|damaged.bin|V=200", *files, *mesh, "-b", 1, "-t", 8, "-x", 3, np=np, left=["main.log"],
                      model="L=1,C=8,NH=4,V=200,maxT=64")
        check(run.seconds < 25, f"{files}, {np} processes: {run.seconds:.1f} s")


def test_killed():
    if not MPI:
        return
    run = run_mesh((2, 1, 2), "-x", 1000000, "-z", 1, "-o", "killed", np=4)
    run.wait_for("step    2/")
    start = time.time()
    os.kill(run.ranks()[2], signal.SIGKILL)
    run.wait()
    check(run.rc != 0 and time.time() - start < 25, f"{time.time() - start:.1f} s, exit status {run.rc}")
    half = lambda: [f for f in os.listdir(f"{tmp}/killed") if f.endswith(".bin.tmp")]
    large = "L=2,C=256,NH=4,V=4096,maxT=64"
    run = train("-x", 1000000, "-n", 1, *mesh_args(2, 1, 2), "-o", "killed", np=4, model=large)
    while not half() and not run.ended():
        time.sleep(0.001)
    os.kill(run.ranks()[1], signal.SIGKILL)
    check(run.wait(25).rc != 0, "killed while it writes a checkpoint")
    left = half() + [write("killed/state_00000099.bin.tmp", b"x")]
    write("killed/model_1.bin.tmp", b"x")
    succeeds(train("-x", 1, "-b", 1, "-t", T, "-o", "killed", model=large))
    check(half() == ["model_1.bin.tmp"], f"of {left} and somebody else's model_1.bin.tmp stay {half()}")


def test_stopped_last():
    """A signal in the last validation or text: what is cut short is no success."""
    def one(before, *args):
        run = train("-x", 1, "--dp", 2, "-b", 1, *args, "-o", before[:4], "--link", "1000,0", quick=False)
        run.wait_for(before)
        run.process.send_signal(signal.SIGINT)
        run.wait()
        check(run.rc == 130 and steps(before[:4]) == [1], f"exit status {run.rc}: {run.out[-300:]}")
        check("stopped by signal 2 after step 1" in run.out, run.out[-300:])

    at_once(lambda: one("step    1/", "-v", 1000, "-m", -1, "--pace", "1e-4"),
            lambda: one("generating", "-s", 1000, "-g", 64, "--pace", "1e-5"))


main((test_meshes, test_same_files, test_accumulation, test_skipped, test_validation, test_elastic, test_llmc,
      test_formulas, test_memory, test_bad_meshes, test_bad_data, test_killed, test_stopped_last), make_one, make_long)
