"""Decode speed in tokens/s by number of sequences, for the engine, vLLM and transformers."""
