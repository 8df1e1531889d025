"""Saving and restoring by all who hold something: replicas write and read their shares, this process the rest."""
