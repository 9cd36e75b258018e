"""A step's data: sequences, batch, scheduler, sampler."""
