"""The backend xgrammar."""
