"""Constraints as requests spell them."""
