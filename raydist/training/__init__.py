"""Training loops that the library owns: compile, fit, evaluate, predict."""
