"""Faults, each brought about for real: docs/faults.md lists them all, with the tests elsewhere that cover some."""
