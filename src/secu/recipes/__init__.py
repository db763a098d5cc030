"""Recipes: one YAML file per experiment, with the settings that differ from the defaults and the paper's results."""
