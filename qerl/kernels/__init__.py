"""Operations of a decode step: Triton and CUDA kernels, and the same in plain PyTorch."""
