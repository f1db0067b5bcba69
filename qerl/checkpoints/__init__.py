"""Checkpoint folders in the hub's layout, checked and read by their headers, and the architectures of known models."""
