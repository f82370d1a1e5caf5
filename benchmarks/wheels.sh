#!/bin/sh
# Gather what train_gpu.py needs on a GPU machine without network: sh benchmarks/wheels.sh FOLDER
# There: python3.12 -m venv env && env/bin/pip install --no-index --find-links FOLDER titancli titan-float8 torch
# torchtitan 0.2.2 and 0.3.0 want environments of their own: install each beside torch in its own venv.
set -eu
folder=${1:?usage: sh benchmarks/wheels.sh FOLDER}
python=${PYTHON:-3.12} torch=${TORCH:-torch==2.11.0}
mkdir -p "$folder"
here=$(cd "$(dirname "$0")/.." && pwd)
python3 -m pip wheel --no-deps --wheel-dir "$folder" "$here" "$here/plugins/titan-float8"
python3 -m pip download --dest "$folder" --python-version "$python" --only-binary=:all: \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --find-links "$folder" "$torch" titancli titan-float8 transformers
for version in 0.2.2 0.3.0; do
    python3 -m pip download --dest "$folder" --no-deps --python-version "$python" --only-binary=:all: \
        "torchtitan==$version"
done
ls "$folder" | wc -l
