"""The command for the tree of a run's clusters."""

from typing import Annotated

import typer

from secu.cli.app import Debug, RunFolder, app, console, errors, warn_if_unfinished


@app.command()
def tree(
    run: RunFolder,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write: .nwk or .json; - prints Newick.")] = "-",
    debug: Debug = False,
) -> None:
    """Write the tree of a run's finest clusters."""
    from secu.apps.trees import write_tree
    from secu.train.run import Run

    folder = Run.open(run)
    found = write_tree(folder, output)
    levels = f"{len(found.leaves):,} clusters; cut it with --level 2 to {len(found.leaves)}"
    (errors if output == "-" else console).print(levels, soft_wrap=True)
    warn_if_unfinished(folder)
