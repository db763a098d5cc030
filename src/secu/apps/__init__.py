"""Implementation of the commands: pipeline.py creates a run; the other modules call it or use a finished run."""
