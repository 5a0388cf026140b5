#!/usr/bin/python3
"""The documents are true: links, names of files and options exist, each script is explained, and what
doc/troubleshooting.md quotes is what the program says, provoked or found as a format in the sources.
"""

import glob, os, re

from program import Run, check, data, main, read, shard, succeeds, tmp, train, write

DOCS = ["README.md", "CONTRIBUTING.md", *sorted(glob.glob("doc/*.md")), *sorted(glob.glob("dev/**/README.md", recursive=True))]


def text_of(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def code_blocks(text):
    return re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)


def spans(text):
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


# ---- what they name ----------------------------------------------------------------------------------------
def slugs(text):
    """The anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ +(.*?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", h).lower()).replace(" ", "-") for h in heads}


def test_links():
    links = 0
    for doc in DOCS:
        text = text_of(doc)
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
            if re.match("[a-z]+:", target):
                continue
            links += 1
            path, _, anchor = target.partition("#")
            path = os.path.normpath(os.path.join(os.path.dirname(doc), path)) if path else doc
            check(os.path.exists(path), f"{doc}: {target} exists")
            if anchor and os.path.exists(path):
                check(anchor in slugs(text_of(path)), f"{doc}: {target} is a heading there: {sorted(slugs(text_of(path)))}")
    check(links > 20, f"{links} links")


def test_names():
    """Files of this repository; dev/data/ is llm.c's, ../ and the like are the shell's."""
    named = 0
    for doc in DOCS:
        here = os.path.dirname(doc)
        for name in re.findall(r"(?<![\w./*-])(?:scripts|data|dev|doc|train|flashoverlap)/[\w./-]*\.(?:sh|py|c|h|cu|cuh|md)\b",
                               text_of(doc)):
            if not name.startswith("dev/data/"):
                named += 1
                check(os.path.exists(name) or os.path.exists(os.path.join(here, name)), f"{doc}: {name} exists")
    check(named > 30, f"{named} names of files")


def test_lengths():
    n = text_of("README.md").count("\n")
    check(n < 250, f"README.md has {n} lines, less than 250")


def test_scripts():
    """Whatever is there to be run is mentioned; the Makefile tells what it runs itself."""
    all_text = "".join(map(text_of, [*DOCS, "Makefile"]))
    scripts = [f for f in glob.glob("scripts/*") + glob.glob("data/*.py") + glob.glob("data/*.sh") if os.path.isfile(f)]
    scripts = [f for f in scripts if text_of(f).startswith("#!")]
    check(len(scripts) > 12, f"{len(scripts)} scripts")
    for f in scripts:
        check(re.search(rf"(?<![\w]){re.escape(os.path.basename(f))}", all_text), f"{f} is mentioned in a document")


# ---- options -----------------------------------------------------------------------------------------------
FOREIGN = {"--no-python", "--no_python", "--master_port", "--max_restarts"}  # torchrun's
OPTION = re.compile(r"--?[a-zA-Z][\w-]*")


def commands(text):
    """What follows ./train_gpt and the recipes in blocks of code, up to the end of the command."""
    for block in code_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            for _, rest in re.findall(r"(^|\s)(?:\./train_gpt|scripts/run_\w+\.sh)\s([^;|&#>]*)", line):
                yield rest


def test_options():
    shown = succeeds(Run("--help", quick=False)).out
    known = set(re.findall(rf"^ +(?:(-\w+), )?(--[\w-]+)", shown, re.M))
    known = {name for pair in known for name in pair if name}
    check(len(known) > 50 and {"-b", "--dp", "--dry-run"} <= known, f"--help: {sorted(known)}")
    # programs of others, and of ours beside train_gpt, each of which has its option as a word
    others = "".join(text_of(f) for files in ("**/*.py", "**/*.sh", "dev/**/*.c") for f in glob.glob(files, recursive=True))
    others = set(OPTION.findall(others + text_of("Makefile")))
    used = 0
    for doc in DOCS:
        text = text_of(doc)
        for words in commands(text):
            for option in re.findall(r"(?:^|\s)(--?[a-zA-Z][\w-]*)", words):
                used += 1
                check(option in known, f"{doc}: {option} is an option of train_gpt: {words}")
        for span in spans(text):
            option = re.match(r"--?[a-zA-Z][\w-]*(?=$|[ =])", span)
            if option:
                check(option.group() in known | others | FOREIGN, f"{doc}: `{span}` is an option of some program here")
    check(used > 20, f"{used} options in commands")


# ---- troubles ----------------------------------------------------------------------------------------------
def troubles():
    """{heading: message} of doc/troubleshooting.md."""
    return dict(re.findall(r"^### (.*)\n\n {4}(.*)\n", text_of("doc/troubleshooting.md"), re.M))


def formats():
    """What the sources can say, as (regular expression, its fixed characters)."""
    found = set()
    for f in glob.glob("train/*") + glob.glob("data/*.[ch]") + glob.glob("flashoverlap/**/*.c*", recursive=True) + ["train_gpt.cu"]:
        for joined in re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', text_of(f)):
            found.add("".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)).replace("\\n", "").replace('\\"', '"'))
    texts = {(tuple(re.split(r"%[-+ 0#]*[\d.*]*(?:hh|h|ll|l|z)?[a-zA-Z]", s))) for s in found if "\n" not in s}
    for f in ["Makefile", *glob.glob("scripts/*.sh")]:
        for line in text_of(f).splitlines():
            for s in re.findall(r'"((?:[^"\\]|\\.)*)"', line) + re.findall(r"\(error (.*)", line):
                texts.add(tuple(re.split(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+|\)+$", s)))
    return [(re.compile(".*".join(map(re.escape, parts))), sum(map(len, parts))) for parts in texts]


def test_troubles():
    said, known = troubles(), formats()
    headings = re.findall(r"^### (.*)", text_of("doc/troubleshooting.md"), re.M)
    check(len(headings) >= 20 and len(headings) == len(said), f"{len(headings)} headings, {len(said)} messages")
    for heading, message in said.items():
        message = re.sub(r"^\[rank \d+\] \S+:\d+ \w+: ", "", message)
        best = max((n for pattern, n in known if pattern.fullmatch(message)), default=0)
        check(best >= 12, f"{heading}: some format of the sources is '{message}'")


def provoked(said, heading, *args, out=False, **how):
    run = train(*args, **how).wait()
    text = re.sub("-?nan", "-nan", run.out if out else run.err)
    lines = re.sub(r"need \d+", "need N", text).splitlines()  # bytes of the run's own scalars
    want = re.sub(r"need \d+", "need N", said.get(heading, "nothing"))
    check(want in lines or f"note: {want}" in lines, f"{heading}: the program does not say '{want}', but: {text[:600]}")


def test_provoked():
    """The same, word for word, by doing what is wrong."""
    said = troubles()
    provoked(said, "No data", "-i", "data/fineweb10B/fineweb_train_*.bin")
    write("fineweb_train_000001.bin", b"<!DOCTYPE html><html>not found" + b" " * 2000)
    provoked(said, "A download that failed", "-i", "fineweb_train_000001.bin", "-j", "a_val*")
    shard("val_000000.bin", [1] * 50)
    provoked(said, "Too little data for the batch", "-i", "val_000000.bin", "-j", "a_val*", "-b", 4, "-t", 16)
    shard("bad_train.bin", [300] * 5000)
    provoked(said, "Tokens of another vocabulary", "-i", "bad_train.bin", "-j", "a_val*", "-x", 1)
    for i in range(6):
        shard(f"few_train_00000{i}.bin", [1] * 600)
    provoked(said, "Less than one step", "-i", "few_train*", "-j", "a_val*", "-d", 64000)
    provoked(said, "An option that does not exist", "--learning-rate", 1)
    provoked(said, "An option of a recipe, given again", "-x", 18865, "-x", 100)
    provoked(said, "Too many ranks", "--dp", 8, "--tp", 4)
    provoked(said, "The batch of a step", "-d", 100)
    provoked(said, "A longer sequence than the model has", "-t", 128)
    provoked(said, "More tp ranks than heads", "--tp", 8)
    provoked(said, "Tokens that tp or up can't cut", "--tp", 3, "-b", 1)
    provoked(said, "The output folder", "-x", 1, "-o", "none/such/folder")
    provoked(said, "A tokenizer that is missing", "-x", 1, "--prompt", "x")
    provoked(said, "A prompt that is too long", "-x", 1, "--prompt", "x" * 100, "--tokenizer", "a_tokenizer.bin", "-s", 1)
    provoked(said, "The loss is no number", "-x", 9, "-l", "1000")
    os.makedirs(f"{tmp}/out")
    for folder in ("a", "out/a"):
        succeeds(train("-x", 4, "-n", 2, "-o", folder))
    again = ["-x", 6, "-y", 1]
    provoked(said, "Another model", *again, "-o", "out/a", model="L=2,C=32,NH=4,V=256,maxT=64")
    provoked(said, "Other data", *again, "-o", "a", "-i", "few_train*", "-j", "a_val*")
    write("out/a/state_00000004.bin", read("out/a/state_00000004.bin")[:5000])
    provoked(said, "A damaged checkpoint", *again, "-o", "out/a", out=True)


if __name__ == "__main__":
    main([test_links, test_names, test_lengths, test_scripts, test_options, test_troubles, test_provoked])
