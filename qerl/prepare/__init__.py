"""Preparation of a run: its base checkpoint, its data, and the checks of both."""
