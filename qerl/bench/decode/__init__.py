"""Decode speed: tokens a second by sequences, of the engine, vLLM and transformers."""
