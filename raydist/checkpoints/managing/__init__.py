"""What a `CheckpointManager` consists of: its saves one after the other, and the watch for the end of the process."""
