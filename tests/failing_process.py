"""``secu`` in which the second process fails in its third step; for test_processes.py."""

import os

from secu.base.errors import UserError
from secu.cli import main
from secu.train.step import Step

if os.environ["RANK"] == "1":
    run = Step.run

    def fail(self: Step, size: int) -> None:
        """Raise instead of doing the third step."""
        if int(self.steps_done) == 2:
            raise UserError("made up: 1 must be 2")
        run(self, size)

    Step.run = fail  # type: ignore[method-assign]

main()
