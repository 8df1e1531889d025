"""Training loops of `rd.Model`: compile, fit, evaluate, predict."""
