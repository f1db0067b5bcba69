"""Runs, evaluations and quantization by hand: what the library and the command line offer outside of the workflow."""
