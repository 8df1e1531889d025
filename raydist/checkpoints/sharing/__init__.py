"""Distributed saving and restoring: replicas write and read their shares, the driver the rest."""
