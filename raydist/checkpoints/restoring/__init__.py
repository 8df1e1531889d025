"""Restore saved states into objects: everything is read and compared before any object changes."""
