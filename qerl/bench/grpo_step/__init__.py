"""A whole GRPO step: seconds and memory by part, of this project and of TRL, on the same work."""
