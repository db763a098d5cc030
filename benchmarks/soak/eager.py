"""secu with a checkpoint after every epoch, so that a run which is killed often still advances."""

import secu.train.clock
from secu.cli import main

if __name__ == "__main__":
    secu.train.clock.CHECKPOINT_SECONDS = -1
    main()
