"""CUDA and Triton kernels of decode steps, prefill and updates, and reference implementations in PyTorch."""
