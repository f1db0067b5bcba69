"""Regression gates: a configuration's measurements, compared with a committed baseline (docs/gates.md)."""
