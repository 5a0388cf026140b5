#!/bin/bash
# api.sh FOLDER...: do the devices built in these folders (build/cpu-BF16 ...) define the same functions of the cut?
# Compares the names fo_* (one underscore) that the objects of each device export with the first one's.
set -euo pipefail
names() { find "$1/flashoverlap/cpu" "$1/flashoverlap/cuda" -name '*.o' 2>/dev/null | xargs nm -g --defined-only | awk '$2 ~ /[TDBR]/ && $3 ~ /^fo_[a-z0-9]/ {print $3}' | sort -u; }
first=$(mktemp); other=$(mktemp); trap 'rm -f "$first" "$other"' EXIT
names "$1" >"$first"
passed=0 failed=0
echo "$1: $(wc -l <"$first") functions"
for b in "${@:2}"; do
    names "$b" >"$other"
    if diff "$first" "$other" | grep '^[<>]' | sed "s|^<|only in $1:|; s|^>|only in $b:|"; then failed=$((failed + 1)); else passed=$((passed + 1)); fi
done
[[ $(wc -l <"$first") -ge 60 ]] || { echo "api.sh: $1 has too few names, is it built?"; failed=$((failed + 1)); }
echo "$passed passed, $failed failed"
[[ $failed == 0 ]]
