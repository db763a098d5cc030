"""Kill, interrupt and starve the program at random moments, and look at what it leaves behind."""
