"""Reinforcement learning of language models on 4-bit NVFP4 weights (QeRL, arXiv 2510.11696)."""

__version__ = "0.1.0"
