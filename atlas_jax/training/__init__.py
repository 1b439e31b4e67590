"""Outer training: optimizer, sharded step, checkpoints, the loop."""
