"""4-bit weight formats as pure tensors: codecs, group sizes and the tile layout of the kernels."""
