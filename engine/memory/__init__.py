"""Blocks, keys and values, and recurrent states."""
