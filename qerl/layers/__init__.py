"""Layers of a policy: what stands in its blocks instead of transformers' own modules."""
