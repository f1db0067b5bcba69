"""Checkpoint folders in the hub's layout, checked and read by their headers."""
