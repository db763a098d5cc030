"""The tree of a run's finest clusters as text: Newick, which other programs draw, or JSON."""

import json
from pathlib import Path
from typing import Any

import torch

from secu.base.errors import UserError
from secu.base.files import write_text
from secu.cluster.tree import Tree
from secu.train.checkpoint import load_method
from secu.train.run import Run

FORMATS = ("nwk", "json")


def write_tree(run: Run, output: str) -> Tree:
    """Write the tree of a run to a .nwk or .json file, or print it as Newick if ``output`` is ``-``."""
    kind = "nwk" if output == "-" else Path(output).suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise UserError(f"output: {output!r} must end in .nwk or .json")
    if output != "-" and not Path(output).parent.is_dir():
        raise UserError(f"output: folder {Path(output).parent} does not exist")
    tree = load_method(run, torch.device("cpu")).clustering.finest_tree()
    nodes = nodes_of(tree)
    text = newick(nodes) if kind == "nwk" else json.dumps({"clusters": len(tree.leaves), "nodes": nodes}, indent=1)
    if output == "-":
        print(text)
    else:
        write_text(Path(output), text + "\n")
    return tree


def nodes_of(tree: Tree) -> list[dict[str, Any]]:
    """Return the nodes of a tree as plain values: its leaves first, its root last.

    A leaf has the number of its ``cluster`` in the finest head. Another node has the positions of its two ``children``,
    the ``height`` at which they merge (mean cosine distance, from 0 to 2), and the smallest number of groups that
    separates them (``apart_from``).
    """
    nodes: list[dict[str, Any]] = [{"cluster": leaf, "height": 0.0} for leaf in tree.leaves.tolist()]
    leaves = len(nodes)
    for merge, (first, second, height, _) in enumerate(tree.linkage.tolist()):
        nodes.append({"children": [int(first), int(second)], "height": round(height, 6), "apart_from": leaves - merge})
    return nodes


def newick(nodes: list[dict[str, Any]]) -> str:
    """Return a tree in Newick format, with differences of heights as lengths."""
    texts: list[str] = []
    for node in nodes:
        if "cluster" in node:
            texts.append(f"c{node['cluster']}")
            continue
        parts = [f"{texts[n]}:{node['height'] - nodes[n]['height']:.6f}" for n in node["children"]]
        texts.append(f"({','.join(parts)})")
    return f"{texts[-1]};"
