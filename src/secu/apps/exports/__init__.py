"""Exports of a run's clusters to other tools: one module per tool, each with its ``FORMAT``."""
