#!/bin/bash
# Formats the C and CUDA files it is given; with --check it only names those that would change.
# clang-format 14 pulls a comment that stands before a #pragma to column 0, so it never sees a pragma here.
set -euo pipefail
check=no; [[ "${1:-}" != --check ]] || { check=yes; shift; }
tmp=$(mktemp); trap 'rm -f "$tmp"' EXIT
rc=0
for f in "$@"; do
    sed -E 's@^([ \t]*)#pragma@\1//#pragma@' "$f" | clang-format --assume-filename="$f" |
        sed -E 's@// *#pragma@#pragma@' >"$tmp"
    cmp -s "$f" "$tmp" && continue
    if [[ $check == yes ]]; then echo "not formatted: $f"; rc=1; else cat "$tmp" >"$f"; fi
done
exit $rc
