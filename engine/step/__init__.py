"""A step's data: sequences with the records of their tokens, batch, scheduler."""
