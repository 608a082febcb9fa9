"""Keeps the KV cache of large language models outside the GPU and brings it back.

The connector for vLLM is `fx_kvbackend.vllm_adapter`; importing this package imports none of it,
so that tools which only read the cache need neither vLLM nor torch.
"""

__version__ = "0.1.0"
