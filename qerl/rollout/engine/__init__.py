"""The GPU engine: fused products over the policy's own tensors, a paged KV cache, CUDA graphs."""
