"""Completion of an output within its token budget (`complete`)."""
