#!/bin/bash
# api.sh FOLDER...: do the devices built in these folders (build/cpu-BF16 ...) define the same functions of the cut?
# Compares the names fo_* (one underscore) that the objects of each device export with the first one's.
set -euo pipefail
names() {
    nm -g --defined-only "$1"/flashoverlap/c[pu]*/*.o | awk '$2 ~ /[TDBR]/ && $3 ~ /^fo_[a-z0-9]/ {print $3}' | sort -u
}
first=$(mktemp) other=$(mktemp) diffs=$(mktemp); trap 'rm -f "$first" "$other" "$diffs"' EXIT
names "$1" >"$first"
passed=0 failed=0
echo "$1: $(wc -l <"$first") functions"
for b in "${@:2}"; do
    names "$b" >"$other"
    if diff "$first" "$other" >"$diffs"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        sed -n "s|^<|only in $1:|p; s|^>|only in $b:|p" "$diffs"
    fi
done
[[ $(wc -l <"$first") -ge 60 ]] || { echo "api.sh: $1 has too few names, is it built?"; failed=$((failed + 1)); }
echo "$passed passed, $failed failed"
[[ $failed == 0 ]]
