"""Samplers: the protocol, the eager sampler of CPUs, the GPU engine and vLLM."""
