"""Parts of `CheckpointManager`: the sequence of saves, and the watch for preemption."""
