"""One file per kind of source: what it lists, and how it reads an image. base.py has what they have in common."""
