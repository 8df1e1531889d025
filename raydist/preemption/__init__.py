"""Leaving in time: SIGTERM and drained nodes become a note, which what runs steps reads between two of them."""
