"""Mask pools: the protocol that an engine uses, the pool in the same process, and how a
pool is opened by name."""
