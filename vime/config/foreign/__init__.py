"""Flags of Megatron, vLLM and its router, from committed manifests."""
