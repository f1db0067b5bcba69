"""Layers of a policy, which replace transformers' modules in its blocks."""
