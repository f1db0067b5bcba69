"""Measurements of speed and memory: decoding, GRPO steps, prompts."""
