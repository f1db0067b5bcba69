"""Seconds and memory of a whole GRPO step by part, for this project and for TRL on the same work."""
