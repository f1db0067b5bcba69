"""A policy: a frozen base with what is trained on it; its loading and export."""
