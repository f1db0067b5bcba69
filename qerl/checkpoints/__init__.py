"""Checkpoint folders in the hub's layout, which are checked by their headers, and architectures of known models."""
