"""Structural tags: how the libraries enforce them, and how outputs are read by them."""
