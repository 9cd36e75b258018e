"""The backend llguidance."""
