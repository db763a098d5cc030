"""The command that writes a run's model or its clusters for other programs."""

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

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
        _export_clusters(run, path, to, names=names, copy=copy, force=force, device=device, data=data)
        return
    if names is not None or copy or force:
        raise UserError("export: --names, --copy and --force need --to")
    if path.suffix != ".onnx":
        raise UserError(f"export: {path} must end in .onnx; to export the clusters, name a tool with --to")
    from secu.apps.export import export_onnx

    folder = Run.open(run)
    export_onnx(folder, path)
    console.print(str(path), soft_wrap=True)
    warn_if_unfinished(folder)


def _export_clusters(path: Path, destination: Path, tool: str, *, force: bool, **more: Any) -> None:
    from secu.apps.console import ConsoleListener
    from secu.apps.exports.content import Request
    from secu.apps.exports.writing import FORMATS, export_to
    from secu.train.run import Run

    form = FORMATS[tool]
    folder = Run.open(path)
    with ConsoleListener(errors) as listener:
        count = export_to(tool, Request(folder, listener=listener, **more), destination, force=force)
    console.print(f"{count:,} images in {destination}", soft_wrap=True)
    console.print(
        f"open it: {form.opening.format(path=str(destination), quoted=quote(str(destination)))}", soft_wrap=True
    )
    warn_if_unfinished(folder)
