"""Layers of a policy, which replace transformers' own modules in its blocks."""
