"""Giving saved states to objects: all is compared and read before anything is changed."""
