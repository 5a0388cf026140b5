"""What the scripts of predictions share: what --plan prints, ranges of a document that a script writes, files that are
whole or not there. It is no program itself.
"""

import os, re, subprocess

PROGRAM = "build/cpu-BF16-mpi/train_gpt"


class UserError(Exception):
    pass


class CommandFailed(UserError):
    def __init__(self, command, status, said):
        super().__init__(f"{' '.join(map(str, command))}: exit status {status}: {said}")
        self.status, self.said = status, said


def output_of(command, **how):
    """What a command prints; one line with its reason if it fails."""
    try:
        run = subprocess.run([str(word) for word in command], capture_output=True, text=True, **how)
    except OSError as e:
        raise UserError(f"{command[0]}: {e.strerror}: build it first, with make") from None
    if run.returncode != 0:
        said = (run.stderr.strip() or run.stdout.strip() or "it says nothing").split("\n")[0]
        raise CommandFailed(command, run.returncode, said)
    return run.stdout


def plan(program, hardware, args):
    """{mode: {"step_ms", "comm_ms", "exposed_ms", "mfu", "tok_s"}} of --plan; "gib", if that is more than there is."""
    lines = output_of([program, "--plan", hardware, *args]).split("\n")
    modes = {}
    for line in lines[next(i for i, l in enumerate(lines) if l.startswith("overlap")) + 1:]:
        short = re.match(r" +needs ([0-9.]+) GiB", line)
        if short:
            mode["gib"] = float(short.group(1))
            continue
        if not line.strip():
            break
        name, step, comm, exposed, _, mfu, rate = line.split()
        mode = modes[name] = {"step_ms": float(step), "comm_ms": float(comm), "exposed_ms": float(exposed),
                              "mfu": float(mfu.rstrip("%")), "tok_s": float(rate)}
    return modes


def write_whole(path, text):
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w") as f:
            f.write(text)
        os.replace(temporary, path)
    except OSError as e:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise UserError(f"{path}: {e.strerror}") from None


def range_of(path, name):
    """What stands before and after the text between the lines `<!-- name -->` and `<!-- end of name -->` of a document."""
    try:
        with open(path) as f:
            before = f.read()
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    if before.count(begin) != 1 or before.count(end) != 1 or before.index(begin) > before.index(end):
        raise UserError(f"{path}: has no lines '{begin.strip()}' and '{end.strip()}' for the table")
    return before[:before.index(begin)] + begin, before[before.index(end):]


def replace_range(path, name, text):
    """Puts text there."""
    before, after = range_of(path, name)
    write_whole(path, before + text + after)
