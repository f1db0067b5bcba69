"""Samplers: the protocol, the eager sampler for CPUs, the engine for GPUs, and vLLM."""
