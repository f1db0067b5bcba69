"""GPU kernels, each beside its reference: decode products of packed weights, and what stands around them."""
