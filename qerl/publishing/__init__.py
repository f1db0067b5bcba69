"""Publishing of trained policies: their cards, and the upload."""
