"""Arguments and options that several commands share, and long ones."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

_CLUSTERS = "Number of clusters, or a range such as 5..40. Default: chosen by the run."
_ENCODER = "Pretrained network: lite0, or hf:NAME-OR-FOLDER."
_KEEP_BEST = "Keep the last epoch whose label-free score is near the best one, or simply the last."
_PREDICTIONS = "File (.csv, .jsonl, .parquet) or folder/; - prints CSV."
_PUBLISHED = "Use the setting that the paper follows instead of our rules."
_SOURCE = "Folder, glob, .npy, .csv, .parquet, .zip or .tar of images, or shards."
_TOOL = "Export the clusters to fiftyone, embedding-atlas, huggingface or labelstudio."
_UNIQUE = "Of near-duplicates, keep only the largest picture."

RunFolder = Annotated[Path, Argument(metavar="RUN", help="Folder of a run.")]
Source = Annotated[str, Argument(metavar="SOURCE", help=_SOURCE)]
Overrides = Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Settings to change.")]
ExportPath = Annotated[Path, Argument(metavar="DEST", help="MODEL.onnx; with --to, a new folder or .parquet file.")]

Device = Annotated[str, Option(help="auto, cuda, mps or cpu.")]
DataRoot = Annotated[Path | None, Option("--data", help="Folder of data sets. Default: $SECU_DATA or the cache.")]
Resume = Annotated[bool, Option("--resume", help="Continue the run in --out.")]
Force = Annotated[bool, Option("--force", help="Replace the run in --out.")]
TimeLimit = Annotated[str | None, Option(help="Stop cleanly after this time: 90s, 9m, 2h.")]
TensorBoard = Annotated[bool, Option("--tensorboard", help="Also write events for TensorBoard into the run.")]

Clusters = Annotated[str | None, Option("--clusters", "-k", help=_CLUSTERS)]
Balance = Annotated[float | None, Option(help="Minimum size of a cluster, as a share of an equal size: from 0 to 1.")]
Encoder = Annotated[str, Option(help=_ENCODER)]
EncoderOrRule = Annotated[str | None, Option(help=f"{_ENCODER} Default: chosen by rule.")]
Hints = Annotated[Path | None, Option(help="Table of names or links of some images, or one downloaded from a report.")]
AllowBad = Annotated[bool, Option("--allow-bad", help="Continue if more than 5% of the images cannot be read.")]
KeepBest = Annotated[bool, Option("--keep-best/--keep-last", help=_KEEP_BEST)]
AsPublished = Annotated[bool, Option("--as-published", help=_PUBLISHED)]

Level = Annotated[int | None, Option(help="Use this many groups of the tree (secu tree) instead of the clusters.")]
Names = Annotated[Path | None, Option(help="Table downloaded from the report, with names, merges and marks.")]
Copy = Annotated[bool, Option("--copy/--link", help="Copy the files, or link to them.")]
Unique = Annotated[bool, Option("--without-duplicates", help=_UNIQUE)]
Tool = Annotated[str | None, Option(help=_TOOL)]
Predictions = Annotated[str, Option("--output", "-o", help=_PREDICTIONS)]
Raw = Annotated[bool, Option("--raw", help="In CSV, omit the ' before text that a spreadsheet would evaluate.")]
TreeFile = Annotated[str, Option("--output", "-o", help="File to write: .nwk or .json; - prints Newick.")]
