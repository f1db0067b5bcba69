"""Regression gates: what a configuration measured, compared with a committed baseline (docs/gates.md)."""
