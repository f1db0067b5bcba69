"""Benches of speed and memory: decoding, rollouts, prompts and GRPO steps."""
