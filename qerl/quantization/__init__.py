"""Quantization of dense checkpoints to 4 bits: rounding to nearest, AWQ, and the writer."""
