"""Faults that the tests cause for real. docs/faults.md lists all of them, with tests elsewhere that cover some."""
