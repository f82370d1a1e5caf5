#!/bin/sh
# What train_gpu.py needs on a machine without network that has PyTorch, transformers and pytest, but not titan:
#
#   sh benchmarks/wheels.sh FOLDER             where there is network: gathers 15 MB of wheels
#   sh benchmarks/wheels.sh install FOLDER TO  over there: unpacks them to TO/titan, TO/torchtitan-0.2.2, TO/…-0.3.0
#   PYTHONPATH=$PWD:TO/titan python benchmarks/train_gpu.py --out OUT \
#       --torchtitan 0.2.2=TO/torchtitan-0.2.2 0.3.0=TO/torchtitan-0.3.0
#   PYTHONPATH=$PWD:TO/titan python -m pytest -m gpu $(grep -rl mark.gpu --include='test_*.py' tests plugins)
#
# $PWD first: what is measured is the code that lies here, not that of the wheel, made before the last change.
# PYTHON=3.12 (the default) is the Python over there. torchtitan 0.3.0 wants a torch newer than 2.11.
set -eu
usage="usage: sh benchmarks/wheels.sh [install] FOLDER [TO]"
if [ "${1:-}" = install ]; then
    from=${2:?$usage} to=${3:?$usage}
    for site in titan torchtitan-0.2.2 torchtitan-0.3.0; do
        python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$to/$site" "$from/$site"/*.whl
    done
    exit
fi
folder=${1:?$usage} python=${PYTHON:-3.12}
here=$(cd "$(dirname "$0")/.." && pwd)

# pinned NAME...: as constraints.txt has them
pinned() { for name; do grep -i "^$name==" "$here/constraints.txt"; done; }

# fetch SITE REQUIREMENT...
fetch() {
    site=$1 && shift && mkdir -p "$folder/$site"
    python3 -m pip download -q --no-deps --only-binary=:all: --dest "$folder/$site" --implementation cp \
        --python-version "$python" --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux_2_24_x86_64 "$@"
}

of_titan="tomli tomli_w pydantic pydantic_core annotated-types typing-inspection torchao datasets dill multiprocess"
# shellcheck disable=SC2086 # one word for each
wanted=$(pinned $of_titan)
# shellcheck disable=SC2086
fetch titan $wanted
set -- "$here"
for plugin in "$here"/plugins/titan-*/; do set -- "$@" "$plugin"; done
python3 -m pip wheel -q --no-deps --wheel-dir "$folder/titan" "$@"
read_by="torchdata==0.11.0 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0 einops==0.8.2 datasets==4.7.0 dill==0.4.1
    multiprocess==0.70.19 tomli==2.5.0"
# shellcheck disable=SC2086
fetch torchtitan-0.2.2 torchtitan==0.2.2 $read_by
# shellcheck disable=SC2086
fetch torchtitan-0.3.0 torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing==0.1.1 $read_by
du -sh "$folder"
