"""What a run needs before it starts: its base checkpoint, its data, and the checks of both."""
