"""Guided decoding inside other engines. Nothing else in `guided` imports this
package."""
