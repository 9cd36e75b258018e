"""Reading a request: its body, constraint, prompt and tools, and the job that these
make."""
