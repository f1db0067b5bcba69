"""Dense checkpoints to 4 bits: round to nearest, AWQ, and the writer."""
