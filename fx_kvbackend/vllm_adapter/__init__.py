"""The only room that imports vllm."""
