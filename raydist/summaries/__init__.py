"""TensorBoard summaries of steps and programs: recording, merging over replicas, writing event files."""
