"""The parts of a parameter server: its state, changes of it, and the rule of consistency."""
