"""Preemption: SIGTERM and drained nodes set a flag, which step loops check at step boundaries."""
