#!/usr/bin/python3
"""breaks.py -- breaks the sources on purpose, one place at a time, and looks whether a test in emulation sees it.

Places: every wait of a stream, events recorded before their work, credits of the local transport skipped, receives
swapped, every guard of a kernel loosened by one, every __syncthreads and __syncwarp removed. Most are found by
patterns, the rest stands in EXPLICIT. Each break is made in a copy of the tree (build/breaks), where the program that
should see it is built with the checker (DEVICE=emu SAN=check) and run in several schedules. A break is caught if each
run fails: a failed check, a report of the checker, a crash, a hang. The first run that passes ends it as missed.
HARMLESS has breaks that change nothing, and why: they are counted neither way. First the unbroken tree must pass.

    dev/emu/breaks.py --runs 20 --only 'wait|event|credit|receive'

What a place is, and which test is to see it, can be had by --list. The last line is 'N passed, N failed'.
"""

import argparse, collections, filecmp, glob, os, queue, re, shutil, subprocess, sys, threading, time

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
CUDA = "flashoverlap/cuda/"
TESTS = {
    "flashoverlap/fo_exec.c": "test_overlap",
    "flashoverlap/fo_overlap.c": "test_overlap",
    "flashoverlap/fo_fetch.c": "test_fetch",
    "flashoverlap/fo_zero.c": "test_zero",
    "flashoverlap/fo_ulysses.c": "test_ulysses",
    "flashoverlap/fo_allreduce.c": "test_allreduce",
    CUDA + "comm_local.cu": "test_comm",
    CUDA + "device.cu": "test_device",
    CUDA + "ops.cu": "test_ops",
    CUDA + "matmul.cu": "test_matmul",
    CUDA + "attention.cu": "test_attention",
    CUDA + "attention.cuh": "test_attention",
    CUDA + "attention_kernels.cu": "test_attention",
    CUDA + "attention_mma.cu": "test_attention",
    CUDA + "cuda_common.cuh": "test_ops",
}
# a header's break is compiled into these alone
COMPILED = {
    CUDA + "attention.cuh": [CUDA + "attention.cu", CUDA + "attention_kernels.cu", CUDA + "attention_mma.cu"],
    CUDA + "cuda_common.cuh": [CUDA + "ops.cu"],
}
# where it is another program's than the file's
TEST_OF_FUNCTION = {"fo__begin_groups": "test_fetch"}
# in the other precision kernels for tensor cores take most of its cases
FP32 = [CUDA + "attention_kernels.cu"]
SCHEDULES = [path for path in TESTS if path.endswith(".c")]

# number: place in the file. edits: (line, from 0, new text)
Break = collections.namedtuple("Break", "path line kind what edits test")
# (path, kind, what, [(old text, new text)], test if another): each old text occurs once
EXPLICIT = [
    ("flashoverlap/fo_exec.c", "event", "arrived is recorded before its exchange", [
        ("    fo_comm_begin(o->group, o->comm);", "    fo_event_record(o->arrived[e], o->comm); fo_comm_begin(o->group, o->comm);"),
        ("    fo_event_record(o->arrived[e], o->comm);\n", "\n")]),
    ("flashoverlap/fo_exec.c", "event", "computed is recorded before its chunk is computed", [
        ("        fo__wait(o, c->after_exchanges);", "        fo__wait(o, c->after_exchanges); fo_event_record(o->computed[k], o->compute);"),
        ("        if (plan->kind == FO_REDUCESCATTER) { fo_event_record(o->computed[k], o->compute); }", "")]),
    ("flashoverlap/fo_exec.c", "event", "ready is never recorded", [
        ("    if (!o->marked) { fo_event_record(o->ready, o->compute); }", "")]),
    ("flashoverlap/fo_overlap.c", "event", "a mark records nothing, what was recorded last holds", [
        ("    fo_event_record(o->ready, o->compute);", "")]),
    ("flashoverlap/fo_exec.c", "event", "an exchange waits for the compute before its own", [
        ("fo_stream_wait(o->comm, o->computed[k], NULL);", "fo_stream_wait(o->comm, o->computed[k > 0 ? k - 1 : 0], NULL);")]),
    ("flashoverlap/fo_exec.c", "event", "compute waits for the exchange before the one it needs", [
        ("o->arrived[n - 1], &o->exposed_ms", "o->arrived[n > 1 ? n - 2 : 0], &o->exposed_ms")]),
    ("flashoverlap/fo_exec.c", "event", "a mark holds for later calls too", [("    o->marked = 0;\n    fo_stream_wait", "    fo_stream_wait")]),
    ("flashoverlap/fo_exec.c", "event", "rows packed by the call are thought to be marked", [
        ("    o->marked = 0; // a mark made before this call can't speak for the rows packed just now", "")],
     "test_fetch"),
    (CUDA + "comm_local.cu", "event", "ready is never recorded", [
        ("    if (b->nrecvs > 0 && !d->capturing) { CUDA(cudaEventRecord(seat->ready, b->stream->stream)); }", "")]),
    (CUDA + "comm_local.cu", "event", "done is recorded before the copy", [
        ("        copy(b, m, &post, seat);\n        CUDA(cudaEventRecord(box->done[n], stream));",
         "        CUDA(cudaEventRecord(box->done[n], stream));\n        copy(b, m, &post, seat);")]),
    (CUDA + "comm_local.cu", "event", "in a graph, a message is said to be there before it is copied", [
        ("        queue_mem_ops(b, &ops);\n        copy(b, m, &post, seat);\n", "        queue_mem_ops(b, &ops);\n"),
        ("flags->data[me][n], 1);\n        queue_mem_ops(b, &ops);", "flags->data[me][n], 1);\n        queue_mem_ops(b, &ops); copy(b, m, &post, seat);")]),
    (CUDA + "comm_local.cu", "credit", "in a graph, none is waited for", [("        add_take(&ops, &seat->flags->ready[m->to][n]);", "")]),
    (CUDA + "comm_local.cu", "credit", "in a graph, nothing waits for the message", [
        ("            add_take(&landed, &seat->flags->data[r->from][n]);", "            (void)seat;")]),
    (CUDA + "comm_local.cu", "credit", "in a graph, one is taken but stays", [("    add_write(m, flag, 0);", "")]),
    (CUDA + "comm_local.cu", "credit", "in a graph, that of another message of the pair is taken", [
        ("        add_take(&ops, &seat->flags->ready[m->to][n]);", "        add_take(&ops, &seat->flags->ready[m->to][0]);")]),
    (CUDA + "comm_local.cu", "credit", "the receiver's host does not wait for the sender's word", [
        ("if (!await(box, &box->posts[n].done, &NOT_YET, b->patience_s)) {", "if (pthread_mutex_lock(&box->mutex)) {")]),
    (CUDA + "comm_local.cu", "receive", "two from the same rank are swapped", [
        ("        box->posts[n].dst = r->dst;", "        for (int j = 0; j < b->nrecvs; j++) { if (j != i && b->recvs[j].from == r->from && "
         "b->recvs[j].nbytes == r->nbytes) { r = &b->recvs[j]; break; } }\n        box->posts[n].dst = r->dst;")]),
    ("flashoverlap/fo_exec.c", "receive", "two of a plan are swapped", [
        ("m, x->recv % m);", "m, m == 1 ? 0 : (x->recv % m + 1) % m);")]),
    ("flashoverlap/fo_exec.c", "receive", "slots of two are swapped", [
        ("    return plan->topology == FO_DIRECT ? from :", "    return plan->topology == FO_DIRECT ? (plan->P == 3 && from >= 0 ? 3 - plan->r - from : from) :")]),
    ("flashoverlap/fo_exec.c", "receive", "rows of two groups are swapped", [
        ("*from = &recv_first[plan->exchanges[e].recv_from];", "*from = &recv_first[plan->exchanges[e].send_to];")],
     "test_fetch"),
    ("flashoverlap/fo_allreduce.c", "receive", "two are swapped", [
        ("fo_recv(g, parts + (size_t)from * nelem + first,", "fo_recv(g, parts + (size_t)to * nelem + first,")]),
    ("flashoverlap/fo_ulysses.c", "receive", "blocks of two groups are swapped", [
        ("FoPiece recv = {(char*)(x->out + ((size_t)j * x->N", "FoPiece recv = {(char*)(x->out + ((size_t)(h->U - 1 - j) * x->N")]),
    (CUDA + "device.cu", "event", "an event is recorded once", [
        ("    CUDA(cudaEventRecord(e->event, s->stream));", ""),
        ("    if (!e->event) { CUDA(cudaEventCreateWithFlags(&e->event, cudaEventDisableTiming)); }",
         "    if (!e->event) { CUDA(cudaEventCreateWithFlags(&e->event, cudaEventDisableTiming)); CUDA(cudaEventRecord(e->event, s->stream)); }")]),
    (CUDA + "ops.cu", "guard", "count > -1 in load_part", [("        if (count > 0) { x = load", "        if (count > -1) { x = load")]),
    (CUDA + "ops.cu", "guard", "count > -1 in store_part", [("        if (count > 0) { store(p, x); }", "        if (count > -1) { store(p, x); }")]),
    (CUDA + "ops.cu", "guard", "softmax_add: the last vector but one element is not cut", [
        ("        if (valid - c - j * step < VEC) {", "        if (valid - c - j * step < VEC - 1) {")]),
    (CUDA + "ops.cu", "guard", "softmax_gradient: a vector that lacks one is not cut", [("    if (count < VEC) {", "    if (count < VEC - 1) {")]),
    (CUDA + "ops.cu", "guard", "softmax_gradient of valid - at + 1", [("max, scale, valid - at)", "max, scale, valid - at + 1)")]),
    (CUDA + "ops.cu", "guard", "square_sum_of one more, rows in registers", [
        ("mu, C - first - k * WARP * VEC, square_sum);", "mu, C - first - k * WARP * VEC + 1, square_sum);")]),
    (CUDA + "ops.cu", "guard", "square_sum_of one more, wide rows", [("mu, C - c, square_sum);", "mu, C - c + 1, square_sum);")]),
    (CUDA + "ops.cu", "guard", "the last block of square_sum has one more", [("(int)(nelem - first) :", "(int)(nelem - first) + 1 :")]),
    (CUDA + "attention.cu", "guard", "pos < -1: one idle sequence of a decode is not", [("    if (pos < 0) {", "    if (pos < -1) {")]),
]
# (file, what has it, why)
NONE = "no rows: nothing is stored"
EMPTY = "one more step, over nothing"
GUARDED = "the loads and stores inside have guards of their own"
SLOW = "right, but slower: all that it adds is masked"
MASKED = "what it computes is masked"
ADDRESS = "an address that is not used"
HARMLESS = [
    ("attention.cu", "<= pos + 1 in: for", EMPTY),
    ("attention.cu", "<= ngroups in: for (int k", "sums of a group that is not among those added"),
    ("attention.cu", "<= n in: for (int k = i / WARP", "a score that nobody reads"),
    ("attention.cuh", "<= end in: Span s", "the difference is 0 there"),
    ("attention.cuh", "<= s.t0 + s.nt in: for", SLOW),
    ("attention_kernels.cu", "< 0 in: if", NONE),
    ("attention_kernels.cu", "<= end in: for", EMPTY),
    ("attention_kernels.cu", "<= queries.nt in: size_t at", ADDRESS),
    ("attention_kernels.cu", "<= queries.nt in: st->lse", MASKED),
    ("attention_kernels.cu", "<= queries.nt in: st->delta", MASKED),
    ("attention_kernels.cu", "<= a.l.T in: for", EMPTY),
    ("attention_kernels.cu", "<= queries.nt in: int visible", "of a query that is not there all factors are 0"),
    ("attention_kernels.cu", "<= queries.t0 + queries.nt in: for", SLOW),
    ("attention_kernels.cu", "<= keys.nt in: int counts", "that key is later than all queries: masked"),
    ("attention_mma.cu", "< 0 in: if", NONE),
    ("attention_mma.cu", "<= end in: if (t + STEP", "copies a tile of zeros that nobody reads"),
    ("attention_mma.cu", "<= rows.t0 + row + 16 * M - 1 + 1 in: if", SLOW),
    ("attention_mma.cu", "<= queries.nt in: size_t at", ADDRESS),
    ("attention_mma.cu", "<= queries.nt in: st->delta", "p is 0 there"),
    ("attention_mma.cu", "<= a.l.T in: if", "copies a tile of zeros that nobody reads"),
    ("attention_mma.cu", ">= key0 - 1 in: if", SLOW),
    ("attention_mma.cu", ">= key0 + 15 - 1 in: int all", "both are multiples of 16"),
    ("attention_mma.cu", "in: while (t < end", SLOW),
    ("attention_mma.cu", "<= keys.nt in: int counts", "that key is later than all queries: masked"),
    ("attention_mma.cu", "> end in: if (queries.nt", "no keys: nothing is added"),
    ("attention_mma.cu", "<= end in: if (next", "copies a tile that nobody reads"),
    ("attention_mma.cu", "<= query0 + 15 + 1 in: if", SLOW),
    ("matmul.cu", "<= g.k in: for", "one more tile, of zeros"),
    ("matmul.cu", "<= nelem in: if (i < nelem) { out[i] = from_float", "its launches have whole blocks"),
    ("ops.cu", "<= (size_t)C in: for", GUARDED),
    ("ops.cu", "<= C in: for (int c = first", GUARDED),
    ("ops.cu", "<= C in: for (int c = (int)threadIdx.x * VEC", GUARDED),
    ("ops.cu", "<= V in: for", GUARDED),
    ("ops.cu", "<= V in: if (at", "store_part is told 0 elements"),
    ("ops.cu", "<= end in: for (int k", GUARDED),
    ("ops.cu", "<= P in: for (int p = 0; p < P; p += AHEAD", GUARDED),
    ("ops.cu", "<= valid in: if (c + j", "adds exp(-inf)"),
    ("ops.cu", "<= valid in: for", GUARDED),
    ("ops.cu", "<= end in: for (size_t i = first + ((size_t)", GUARDED),
]


def read(path):
    with open(path) as f:
        return f.read().split("\n")


def code(line):
    return line.split("//")[0].rstrip()


# ---- places found by patterns -------------------------------------------------------------------------------------
def whole_statement(lines, i):
    """The lines of the statement that begins in line i."""
    end = i
    while not code(lines[end]).endswith((";", "}", "{")):
        end += 1
    return end


def removed(path, lines, i, kind, call):
    """Line i with its call taken out: a statement of its own, or all that an if has."""
    end = whole_statement(lines, i)
    text = " ".join(code(line).strip() for line in lines[i : end + 1])
    at = text.index(call)
    depth, stop = 0, at
    for stop in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[stop], 0)
        if text[stop] == ";" and depth == 0:
            break
    edits = [(i, text[:at] + ";" + text[stop + 1 :])] + [(j, "") for j in range(i + 1, end + 1)]
    return Break(path, i + 1, kind, f"without {text[at:stop]}", edits, TESTS[path])


def test_of(path, lines, i):
    while not re.match(r"\w", lines[i]):
        i -= 1
    return next((test for name, test in TEST_OF_FUNCTION.items() if name in lines[i]), TESTS[path])


def waits():
    calls = re.compile(r"\b(fo_stream_wait|fo__wait|wait_for_rank|start|fo_allgather_end|fo_alltoall_end)\(")
    for path in SCHEDULES:
        lines = read(path)
        for i, line in enumerate(lines):
            match = calls.search(code(line))
            if match and line.startswith(" ") and ";" in code(line):
                yield removed(path, lines, i, "wait", match.group())._replace(test=test_of(path, lines, i))
    for path in (CUDA + "comm_local.cu", CUDA + "device.cu"):
        lines = read(path)
        for i, line in enumerate(lines):
            if "CUDA(cudaStreamWaitEvent(" in code(line):
                test = "test_comm" if path.endswith("local.cu") else "test_device"
                yield removed(path, lines, i, "wait", "CUDA(cudaStreamWaitEvent(")._replace(test=test)


def barriers():
    for path in sorted(glob.glob(CUDA + "*.cu*")):
        if path not in TESTS:
            continue
        lines = read(path)
        for i, line in enumerate(lines):
            match = re.search(r"__sync(threads|warp)\(\);|copies\.wait\(\);", code(line))
            if match:
                edits = [(i, line.replace(match.group(), ";", 1))]
                yield Break(path, i + 1, "barrier", f"without {match.group()[:-1]}", edits, TESTS[path])


def kernels(lines):
    """Numbers of the lines that lie in functions of the device."""
    header, inside = "", False
    for i, line in enumerate(lines):
        if not inside and re.match(r"\S", line) and not line.startswith(("//", "#", "/*", " *")):
            header = line if line.startswith(("template", "static", "struct", "enum")) else header + line
            header += " "
        elif not inside:
            header += line
        if inside and line == "}":
            inside, header = False, ""
        elif inside:
            yield i
        elif code(line).endswith("{") and re.search(r"__(global|device)__", header):
            inside = True


def operand(text):
    """What stands at the head of the text, up to the end of the expression that it is."""
    depth = 0
    for k, c in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(c, 0)
        colons = "::" in text[max(k - 1, 0) : k + 2]
        if depth < 0 or (depth == 0 and not colons and (c in ";?,:" or text[k : k + 2] in ("&&", "||"))):
            return text[:k].rstrip()
    return text


def constant(text, path):
    """Known when it is compiled? Capitals are, but for these sizes."""
    sizes = r"\b[CPV]\b" if path.endswith("ops.cu") else r"\b[CP]\b"
    text = re.sub(r"\b(int|size_t|half)\b|sizeof\(\w+\)|\b\w+<HS>::", "", text)
    return not re.search(r"[a-z]|" + sizes, text)


def guards_of_line(line, path):
    """(what, the line with that guard loosened by one)"""
    text = code(line)
    leaves = re.search(r"\{ (return|continue|__trap\(\)); \}", text)
    for match in re.finditer(r" (<|<=|>=) ", text):
        right = operand(text[match.end() :])
        before, after = text[: match.start()], text[match.end() + len(right) :]
        least = re.match(r" \? .+ : (" + re.escape(right) + ");", after)
        sign, limit = match.group(1), right
        if least:  # the least of two: the limit itself, or the comparison changes nothing
            yield f"{right} + 1", text[: match.end() + len(right) + least.start(1)] + f"{limit} + 1;"
            continue
        if constant(right, path) and not (right == "0" and sign in ("<=", ">=")):
            continue
        if leaves:
            sign, limit = {"<=": ("<", right), ">=": (">", right)}.get(sign, (sign, f"{right} - 1"))
        elif sign == ">=":
            limit = f"{right} - 1"
        elif sign == "<=":
            limit = f"{right} + 1"
        else:
            sign = "<="
        if sign in (">=", "<=") and limit == f"{right} - 1":  # of numbers that may be unsigned
            yield f"{sign} {limit}", before[: len(before) - len(last_term(before))] + \
                f"{last_term(before)} + 1 {sign} {right}" + after
            continue
        yield f"{sign} {limit}", before + f" {sign} {limit}" + after
    for match in re.finditer(r"\bmin\(", text):
        both = text[match.end() :]
        first = operand(both)
        second = operand(both[len(first) + 2 :])
        at = match.end() + len(first) + 2 + len(second)
        yield f"min(..., {second} + 1)", text[:at] + " + 1" + text[at:]
    for match in re.finditer(r"\b(load|store)_part(<[^>]*>)?\(", text):
        rest, at = text[match.end() :], match.end()
        while True:  # to the last argument
            part = operand(rest)
            if rest[len(part) : len(part) + 1] != ",":
                break
            at, rest = at + len(part) + 1, rest[len(part) + 1 :]
        if part.strip() and match.end() != at:
            yield f"{match.group(1)}_part of {part.strip()} + 1", \
                text[: at + len(part)] + " + 1" + text[at + len(part) :]


def last_term(text):
    return re.search(r"[\w.\[\]>-]+$", text).group()


def guards():
    for path in sorted(glob.glob(CUDA + "*.cu*")):
        if path not in TESTS:
            continue
        lines = read(path)
        for i in kernels(lines):
            for what, new in guards_of_line(lines[i], path):
                yield Break(path, i + 1, "guard", f"{what} in: {code(lines[i]).strip()}", [(i, new)], TESTS[path])


def explicit():
    for path, kind, what, changes, *test in EXPLICIT:
        lines, edits = read(path), []
        text = "\n".join(lines)
        for old, new in changes:
            if text.count(old) != 1:
                sys.exit(f"breaks.py: {path} has {text.count(old)} times: {old}")
            first = text[: text.index(old)].count("\n")
            end = first + old.count("\n")
            now = "\n".join(lines[first : end + 1]).replace(old, new, 1)
            edits += [(first, now)] + [(j, "") for j in range(first + 1, end + 1)]
        yield Break(path, edits[0][0] + 1, kind, what, edits, test[0] if test else TESTS[path])


def why_harmless(b):
    for name, part, why in HARMLESS:
        if b.path.endswith("/" + name) and part in b.what:
            return why
    return None


# ---- a tree of its own --------------------------------------------------------------------------------------------
def folder_of(b):
    return f"build/emu-{'FP32' if b.path in FP32 else 'BF16'}-check"


class Tree:
    def __init__(self, root):
        self.root = root
        files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
        for path in files.stdout.split("\n"):
            to = f"{self.root}/{path}"
            if os.path.isfile(path) and not (os.path.exists(to) and filecmp.cmp(path, to, shallow=False)):
                os.makedirs(os.path.dirname(to), exist_ok=True)
                shutil.copyfile(path, to)

    def make(self, program, folder, *flags):
        precision = "PRECISION=" + ("FP32" if "FP32" in folder else "BF16")
        command = ["make", "-j2", "DEVICE=emu", "SAN=check", "MPI=0", precision, *flags, f"{folder}/dev/test/{program}"]
        done = subprocess.run(command, cwd=self.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return None if done.returncode == 0 else done.stdout[-2000:]

    def build_broken(self, b):
        """The program, with the break. unbreak() puts back the sources, and the objects as they were."""
        path = f"{self.root}/{b.path}"
        self.kept = [(path, os.stat(path), open(path).read())]
        lines = read(path)
        for i, text in b.edits:
            lines[i] = text
        with open(path, "w") as f:
            f.write("\n".join(lines))
        self.objects = []
        for source in COMPILED.get(b.path, [b.path]):
            object_file = f"{self.root}/{folder_of(b)}/{source}.o"
            shutil.copy2(object_file, object_file + ".kept")
            self.objects.append(object_file)
            os.remove(object_file)
        if b.path in COMPILED:  # the other objects are to stay
            os.utime(path, ns=(self.kept[0][1].st_atime_ns, self.kept[0][1].st_mtime_ns))
        return self.make(b.test, folder_of(b), "CPPFLAGS=-w")

    def unbreak(self, b):
        path, stat, text = self.kept[0]
        with open(path, "w") as f:
            f.write(text)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        for object_file in self.objects:
            os.replace(object_file + ".kept", object_file)
        for name in ("lib.a", f"dev/test/{b.test}"):
            if os.path.exists(f"{self.root}/{folder_of(b)}/{name}"):
                os.remove(f"{self.root}/{folder_of(b)}/{name}")

    def run(self, program, folder, number, limit):
        """None if it passes, else the first line that says why it does not."""
        orders = ["forward", "reverse", f"random:{number}"]
        schedule = ["eager", "lazy"][number] if number < 2 else f"random:{number}"
        env = dict(os.environ, FO_EMU_SCHED=schedule, FO_EMU_ORDER=orders[number % 3], FO_EMU_STALL_S="5")
        process = subprocess.Popen([f"{folder}/dev/test/{program}"], cwd=self.root, env=env, text=True,
                                   errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        late = threading.Timer(limit, process.kill)
        late.start()
        said = None
        for line in process.stdout:
            if re.search(r": failed: |^emu: |relative error|first difference", line):
                said = line.strip()
                process.kill()
                break
        rest = process.communicate()[0]
        killed_late = not late.is_alive()
        late.cancel()
        if said or process.returncode == 0:
            return said
        if process.returncode == -9 and not killed_late:
            return None  # ended from outside: that proves nothing
        last = rest.strip().split("\n")[-1] if rest else ""
        return f"no end in {limit} s" if killed_late else f"exit status {process.returncode}: {last}"


# ---- all of it ----------------------------------------------------------------------------------------------------
def try_break(tree, b, options):
    errors = tree.build_broken(b)
    ncaught, said = 0, None
    try:
        if errors:
            return 0, "it does not compile: " + errors
        for number in range(options.runs):
            message = tree.run(b.test, folder_of(b), number, options.limit)
            if message is None:
                return ncaught, said or ""
            ncaught, said = ncaught + 1, said or message
        return ncaught, said
    finally:
        tree.unbreak(b)


def worker(tree, places, options, results, lock):
    while True:
        try:
            b = places.get_nowait()
        except queue.Empty:
            return
        ncaught, said = try_break(tree, b, options)
        word = "caught" if ncaught == options.runs else "MISSED"
        with lock:
            results.append(ncaught == options.runs)
            print(f"{word} in {ncaught:2} of {options.runs} | {b.path.split('/')[-1]}:{b.line} | {b.kind} | "
                  f"{b.what} | {b.test} | {said[:300]}", flush=True)


def unbroken_pass(tree, programs, options):
    for program, folder in programs:
        errors = tree.make(program, folder)
        if errors:
            sys.exit(f"breaks.py: {program} can't be built: {errors}")
        for number in range(min(options.runs, 3)):
            start = time.time()
            said = None if options.trust else tree.run(program, folder, number, options.limit)
            if said:
                sys.exit(f"breaks.py: {program} fails without a break: {said}")
            if not options.trust:
                print(f"{program} without a break: passes, {time.time() - start:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Are deliberate breaks seen in emulation?")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="schedules that each is run in")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of 'FILE:LINE | KIND | WHAT | TEST'")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="places at a time")
    parser.add_argument("--limit", type=int, default=600, metavar="S", help="seconds of a run")
    parser.add_argument("--trust", action="store_true", help="that the unbroken tree passes")
    parser.add_argument("--folder", default="build/breaks", help="of the copies of the tree")
    parser.add_argument("--list", action="store_true", help="the places, and nothing else")
    options = parser.parse_args()
    found = [b for find in (waits, explicit, barriers, guards) for b in find()]
    found = [b for b in found if re.search(options.only, f"{b.path}:{b.line} | {b.kind} | {b.what} | {b.test}")]
    places, lock, results = queue.Queue(), threading.Lock(), []
    for b in found:
        why = why_harmless(b)
        if options.list or why:
            print(f"{'harmless' if why else 'to try':8} | {b.path}:{b.line} | {b.kind} | {b.what} | "
                  f"{why or b.test}")
        if not why:
            places.put(b)
    if options.list:
        return 0
    trees = [Tree(f"{options.folder}/0")]
    unbroken_pass(trees[0], sorted({(b.test, folder_of(b)) for b in found if not why_harmless(b)}), options)
    for number in range(1, options.jobs):
        root = f"{options.folder}/{number}"
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(["cp", "-a", trees[0].root, root], check=True)
        trees.append(Tree(root))
    threads = [threading.Thread(target=worker, args=(tree, places, options, results, lock)) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
