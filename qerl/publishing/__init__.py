"""Publishing of trained policies: their cards, their scores in the hub's formats, and the upload."""
