"""Benches of speed and memory: decoding, rollouts, prompts and GRPO steps, beside vLLM, TRL and transformers."""
