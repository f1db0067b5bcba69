"""The decode product in CUDA C++: 4-bit weights times 16-bit activations, plus LoRA."""
