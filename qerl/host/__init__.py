"""What the machine gives: a GPU lease, time and memory, progress, imports and plugins."""
