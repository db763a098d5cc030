"""``python -m secu`` is ``secu``."""

from secu.cli import main

main()
