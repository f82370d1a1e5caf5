#!/usr/bin/env bash
# The environment of `make test-null-gpu`: torch's CUDA build on a device whose kernels do nothing.
#
#   NULL_GPU_ENV=FOLDER   where; else .venv-null-gpu (3.5 GB: torch and Triton, and nothing of NVIDIA's)
#   PYTHON=python3.12     another Python
#
# Made once, and anew where the versions have changed; the library, from device/*.c, at each call.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${NULL_GPU_ENV:-.venv-null-gpu}
state=$(cat constraints.txt pyproject.toml plugins/requirements.txt plugins/*/pyproject.toml "$0" |
    sed -E '/^\[+tool\.(ruff|mypy|pytest)/,/^$/d' | sha256sum)  # their settings install nothing
if [[ "$(cat "$folder/.installed" 2>/dev/null)" != "$state" ]]; then
    rm -rf "$folder" && "${PYTHON:-python3}" -m venv "$folder"
    mkdir "$folder/wheels" && grep -v '^torch==' constraints.txt >"$folder/constraints.txt"
    pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check --no-cache-dir)
    # The build with CUDA and its Triton, without NVIDIA's libraries; a build for the CPU may be what is configured.
    torch=$(sed -n 's/^torch==//p' constraints.txt)
    PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS='' PIP_EXTRA_INDEX_URL='' \
        "${pip[@]}" download --no-deps --dest "$folder/wheels" "torch==$torch"
    "${pip[@]}" install --no-deps "$folder"/wheels/torch-*.whl
    rm -r "$folder/wheels"
    # Whatever else is installed takes the torch that is there, and none of what it says it needs of NVIDIA's.
    sed -i -E '/^Requires-Dist: (cuda-|nvidia-)/d' "$folder"/lib/python3*/site-packages/torch-*.dist-info/METADATA
    "${pip[@]}" install -c "$folder/constraints.txt" numpy torch
    "${pip[@]}" install -c "$folder/constraints.txt" -e ".[dev]" -r plugins/requirements.txt \
        -e plugins/titan-eval -e plugins/titan-float8 -e "plugins/titan-flux[dev]" -e plugins/titan-grain \
        -e plugins/titan-muon -e plugins/titan-optimizers -e plugins/titan-trackio -e plugins/titan-wandb
    echo "$state" >"$folder/.installed"
fi
"$folder/bin/python" tests/null_gpu/build.py
