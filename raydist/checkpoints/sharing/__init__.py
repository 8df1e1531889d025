"""Saving by all who hold something: replicas write their shares, this process the rest."""
