"""What steps and programs show to TensorBoard: recording, merging what replicas recorded, writing event files."""
