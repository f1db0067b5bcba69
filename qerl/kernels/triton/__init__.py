"""Kernels in Triton, imported on GPUs alone."""
