"""Operations of a decode step and weights for them: CUDA and Triton kernels, and the same in plain PyTorch."""
