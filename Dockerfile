# vLLM's official image with the FxKVConnector in it, run by a user that is not root.
#
#   docker build -t fxkv .
#   docker run --gpus all --ipc=host -p 8000:8000 -v fxkv-cache:/var/cache/fxkv fxkv MODEL
#
# MODEL and whatever follows it are arguments of `vllm serve`. The connector is switched on by
# --kv-transfer-config '{"kv_connector":"FxKVConnector","kv_role":"kv_both"}'.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
FROM ${VLLM_IMAGE}

USER root

COPY pyproject.toml README.md LICENSE /opt/fxkv/
COPY fx_kvbackend /opt/fxkv/fx_kvbackend

# --no-deps: vLLM, torch and numpy stay as the image has them.
RUN uv pip install --system --break-system-packages --no-cache --no-deps "xxhash>=3.5" /opt/fxkv

# The official image has this user; a base of one's own may lack it.
# The cache holds what was computed from prompts: for its owner's eyes only. A named volume takes
# owner and mode from here; a directory mounted from the host must belong to UID 2000.
RUN id vllm >/dev/null 2>&1 || useradd --uid 2000 --gid 0 --create-home --home-dir /home/vllm vllm
RUN install -d -m 0700 -o 2000 -g 0 /var/cache/fxkv

ENV FXKV_LOCAL_PATH=/var/cache/fxkv
VOLUME ["/var/cache/fxkv"]

ENV HOME=/home/vllm
WORKDIR /home/vllm
USER 2000:0

ENTRYPOINT ["vllm", "serve"]
