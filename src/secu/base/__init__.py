"""What every layer uses: errors, names, files, YAML, and the processes that share a run."""
