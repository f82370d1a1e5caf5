#!/usr/bin/env bash
# What a version may change, on each torch that titan takes and on each Python at hand: `make test-versions`.
#
#   TORCHES="2.11.0 2.12.0"   these, on the first Python; the others get the one of constraints.txt
#   PYTHONS="python3.12 …"    these; else python3 and what is called python3.11 and on
#   TESTS="tests/losses"      these alone
#
# Each pair has an environment of its own in .venvs/ (of CUDA wheels, 5 GB each; a PIP_EXTRA_INDEX_URL may name an
# index of smaller ones), made once, and a log beside it. Ends with a table, and with 1 where one has failed.
# Another torch takes about 10 minutes of CPU, another Python about 5.
set -uo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE

pinned=$(sed -n 's/^torch==//p' constraints.txt)
read -ra torches <<<"${TORCHES:-2.11.0 2.12.0 $pinned 2.14.1 2.15.0}"
read -ra pythons <<<"${PYTHONS:-python3 python3.11 python3.12 python3.13 python3.14}"
# What either may change: the commands, runs, and what is compiled.
common="tests/cli tests/losses tests/optimizers tests/engine/test_library.py tests/run/test_train.py \
    tests/run/test_pipeline.py tests/run/test_layouts.py tests/docs/test_snippets.py"
of_torch="$common tests/recipe/test_schedules_of_torch.py tests/checkpoint/test_relayout.py \
    tests/distributed tests/parallel tests/ranks"
of_python="$common tests/recipe plugins/titan-torchtitan tests/registry tests/parallel/test_compile.py"

# installed PYTHON FOLDER TORCH: with the versions of constraints.txt beside that torch; made anew when they change.
# Without titan-ft, which no row tests: torchft has no build for each Python.
installed() {
    local pip=("$2/bin/python" -m pip install --quiet --disable-pip-version-check -c "$2/constraints.txt")
    local state
    state=$(cat constraints.txt pyproject.toml plugins/requirements.txt plugins/*/pyproject.toml |
        sed -E '/^\[+tool\.(ruff|mypy|pytest)/,/^$/d' | sha256sum)  # their settings install nothing
    [[ "$(cat "$2/.installed" 2>/dev/null)" == "$state" ]] && return
    rm -rf "$2" && "$1" -m venv "$2" && grep -v '^torch==' constraints.txt >"$2/constraints.txt" &&
        "${pip[@]}" "torch==$3" numpy &&
        "${pip[@]}" -e ".[dev]" -r plugins/requirements.txt -e plugins/titan-eval -e plugins/titan-float8 -e "plugins/titan-flux[dev]" \
            -e plugins/titan-grain -e plugins/titan-muon -e plugins/titan-trackio -e plugins/titan-wandb &&
        echo "$state" >"$2/.installed"
}

table=() failed=0 seen=" "
for python in "${pythons[@]}"; do
    version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3] * (sys.version_info >= (3, 11)))' \
        2>/dev/null)
    [[ -z "$version" || "$seen" == *" $version "* ]] && continue
    [[ "$seen" == " " ]] || torches=("$pinned")
    seen+="$version "
    for torch in "${torches[@]}"; do
        name=python-$version-torch-$torch
        # Layouts on the torch of constraints.txt are what `make test` runs.
        if [[ "$torch" == "$pinned" ]]; then default=$of_python; else default=$of_torch; fi
        read -ra tests <<<"${TESTS:-$default}"
        echo "== Python $version, torch $torch (.venvs/$name.log)"
        mkdir -p .venvs
        if installed "$python" ".venvs/$name" "$torch" >".venvs/$name.log" 2>&1; then
            PATH="$PWD/.venvs/$name/bin:$PATH" ".venvs/$name/bin/python" -m pytest -q -p no:cacheprovider \
                -n "${WORKERS:-2}" --dist loadfile -m "not slow and not real and not gpu" "${tests[@]}" >>".venvs/$name.log" 2>&1 || failed=1
            grep -E '^(FAILED|ERROR) ' ".venvs/$name.log"
            result=$(tail -n 1 ".venvs/$name.log" | tr -d =)
        else
            failed=1 result="cannot be installed: $(tail -n 1 ".venvs/$name.log")"
        fi
        table+=("$(printf '%-9s %-9s %s' "$version" "$torch" "$result")")
    done
done
[[ ${#table[@]} -gt 0 ]] || { echo "no Python of 3.11 or newer among: ${pythons[*]}" >&2; exit 1; }
printf '%-9s %-9s %s\n' Python torch tests
printf '%s\n' "${table[@]}"
exit $failed
