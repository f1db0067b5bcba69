"""Runs, evaluations and quantization by hand, which the library and the command line offer outside of the workflow."""
