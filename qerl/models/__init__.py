"""Checkpoints and models."""
