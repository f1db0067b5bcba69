"""Evaluation by lm-eval, lighteval or the grader of training, with completions from the project's samplers."""
