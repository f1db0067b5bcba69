"""Policies, which are a frozen base with its trained tensors; their loading and export."""
