"""The command that writes a run's model or its clusters for other programs."""

from shlex import quote
from typing import Annotated

from typer import Option

from secu.base.errors import UserError
from secu.cli import options
from secu.cli.app import app, console, errors, warn_if_unfinished


@app.command()
def export(
    run: options.RunFolder,
    path: options.ExportPath,
    to: options.Tool = None,
    names: options.Names = None,
    copy: options.Copy = False,
    force: Annotated[bool, Option("--force", help="Replace an earlier export.")] = False,
    device: options.Device = "auto",
    data: options.DataRoot = None,
) -> None:
    """Export the model as ONNX, or the clusters to another tool."""
    from secu.train.run import Run

    if to is not None:
        from secu.apps.console import ConsoleListener
        from secu.apps.exports.content import Request
        from secu.apps.exports.writing import FORMATS, export_to

        form = FORMATS[to]
        folder = Run.open(run)
        with ConsoleListener(errors) as listener:
            count = export_to(to, Request(folder, names, copy, data, device, listener), path, force=force)
        console.print(f"{count:,} images in {path}", soft_wrap=True)
        console.print(f"open it: {form.opening.format(path=str(path), quoted=quote(str(path)))}", soft_wrap=True)
    else:
        if names is not None or copy or force:
            raise UserError("export: --names, --copy and --force need --to")
        if path.suffix != ".onnx":
            raise UserError(f"export: {path} must end in .onnx; to export the clusters, name a tool with --to")
        from secu.apps.export import export_onnx

        folder = Run.open(run)
        export_onnx(folder, path)
        console.print(str(path), soft_wrap=True)
    warn_if_unfinished(folder)
