"""Typed jobs of the workflow's rules: one model per kind of job, which `plan` makes and `qerl rule` parses."""
