"""Models with random weights for benches: speed and memory do not depend on the values of weights."""
