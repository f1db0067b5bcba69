"""Rollouts of completions of mixed lengths, end to end, by the project's samplers and by vLLM."""
