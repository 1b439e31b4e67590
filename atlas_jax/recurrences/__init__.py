"""Exact recurrences of matrix memories as pure functions over arrays.

Each has a plain token-by-token reference and a chunk-parallel form of its own;
sequences of any length go on from a state [B, H, V, K], in any split.
"""
