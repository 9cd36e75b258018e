"""What an operator needs: the Ray Serve application and its configuration."""
