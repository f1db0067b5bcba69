"""Typed jobs of the workflow's rules: one model per kind of job, made by `plan` and parsed by `qerl rule`."""
