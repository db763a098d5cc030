"""``secu`` with a checkpoint after every epoch, a simple map and double precision; for test_processes.py."""

from process_cases import exactly
from secu.cli import main
from secu.train import clock

exactly()
clock.CHECKPOINT_SECONDS = -1
main()
