"""The GPU engine: fused matrix products on the policy's own tensors, a paged KV cache, and CUDA graphs."""
