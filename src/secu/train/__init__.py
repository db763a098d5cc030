"""Training: batches, steps, epochs and checkpoints of a method, and the run folder."""
