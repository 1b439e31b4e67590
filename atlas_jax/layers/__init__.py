"""Flax NNX layers around the memory."""
