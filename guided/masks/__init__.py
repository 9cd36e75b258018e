"""Masks: a worker computes them, sequence by sequence; compilation and the first
mask."""
