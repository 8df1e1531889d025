"""Asynchronous training beside TensorFlow's parameter servers and plain Ray's: `python -m benchmarks.asynchronous`.

What is timed are workloads as those of `benchmarks.steps`: a repetition is one update, of gradients that one worker
made, and passes of different lines take turns. A *study* finds something that is no time: bytes, an accuracy.
"""
