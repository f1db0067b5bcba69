"""The decode product: 4-bit weights times 16-bit activations, with LoRA, in CUDA C++."""
