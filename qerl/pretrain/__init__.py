"""Base policies that are trained from scratch."""
