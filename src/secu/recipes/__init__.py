"""One YAML file an experiment: what differs from the defaults, and the number the paper reports."""
