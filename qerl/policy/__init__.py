"""Policies: a frozen base with its trained tensors, loading and export."""
