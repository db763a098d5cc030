"""How many copies of photos are found as near-duplicates, and what is found among the photos themselves.

    python benchmarks/duplicates.py FOLDER --work WORK --cifar10 DATA --note "…"   # → benchmarks/results/duplicates.txt

FOLDER is Caltech-101's 101_ObjectCategories. Every second of its classes is in the half that the threshold was
chosen on; the others were measured with it unchanged. WORK keeps links, copies and features between calls. A picture
of all pairs that are found among the photos themselves is written there, to be looked at; --note adds what was seen.
DATA has CIFAR-10, for the time.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data_sets import caltech101, cifar10
from defaults import checked_out, hardware
from duplicates_copies import KINDS, write_images
from numpy.typing import NDArray
from PIL import Image
from results import KEPT

from secu.apps.embed import config_for
from secu.apps.images import load_inputs
from secu.base.files import write_text
from secu.data import Images, load_images, open_images, open_source
from secu.results.duplicates import MOST_BITS, compare_pictures, kept_images, similar_pairs

COPIED = 200  # photos of each half
HALVES = ("choice", "check")
THRESHOLDS = (8, 10, 11, 12, 13, 14, 16, 20, 24)
TIMED = 2_000  # photos
RESULT = KEPT / "duplicates.txt"
SIDE = 100  # pixels of a picture on the sheet
ACROSS = 8

Pairs = NDArray[np.int64]


def half_of(folder: Path, work: Path, half: str, copied: int = COPIED) -> Path:
    """Return a folder with the photos of every second class, and copies of some of them."""
    photos = caltech101(folder)
    names = sorted(photos.names)[HALVES.index(half) :: 2]
    place = work / half
    if not place.exists():
        files = [Path(path) for name in names for path in sorted(photos.pixels) if Path(path).parent.name == name]
        write_images(files, copied, place, seed=HALVES.index(half))
    return place


def features_of(place: Path, work: Path) -> Images:
    """Return the images of a folder with features as their inputs, as a run has them."""
    source = open_source(str(place))
    return load_inputs(config_for(source, "lite0"), source, cache=work / "cache")


def compared(images: Images) -> tuple[Pairs, Pairs]:
    """Return the pairs of images that are compared (P, 2), and in how many bits each differs (P,)."""
    pairs_P2 = similar_pairs(images.fetch(torch.arange(len(images))))
    return pairs_P2, compare_pictures(images, pairs_P2)


def table(images: Images, pairs_P2: Pairs, bits_P: Pairs) -> Iterator[str]:
    """Yield lines: how many copies of each kind are found for each threshold, and how many pairs of photos."""
    kind_of = [name.partition("/")[0] for name in images.ids]
    photo_of = [name.partition("/")[2] for name in images.ids]
    yield "bits  " + "  ".join(f"{kind:>15}" for kind in KINDS) + "  pairs of photos"
    for most in THRESHOLDS:
        found: set[tuple[str, str]] = set()
        photos = 0
        for one, other in pairs_P2[bits_P <= most].tolist():
            kinds = {kind_of[one], kind_of[other]}
            if kinds == {"originals"}:
                photos += 1
            elif "originals" in kinds and photo_of[one] == photo_of[other]:
                found.add((max(kinds - {"originals"}), photo_of[one]))
        shares = [sum(kind == name for name, _ in found) / kind_of.count(kind) for kind in KINDS]
        mark = "*" if most == MOST_BITS else " "
        yield f"{most:4}{mark} " + "  ".join(f"{share:15.1%}" for share in shares) + f"  {photos:15,}"


def draw_sheet(images: Images, pairs_P2: Pairs, place: Path, path: Path) -> None:
    """Draw pairs of photos side by side."""
    rows = -(-len(pairs_P2) // ACROSS)
    sheet = Image.new("RGB", (ACROSS * (2 * SIDE + 10), max(1, rows) * (SIDE + 8)), "white")
    for number, pair in enumerate(pairs_P2.tolist()):
        for side, i in enumerate(pair):
            with Image.open(place / images.ids[i]) as photo:
                tile = photo.convert("RGB")
            tile.thumbnail((SIDE, SIDE))
            corner = (number % ACROSS * (2 * SIDE + 10) + side * (SIDE + 2), number // ACROSS * (SIDE + 8))
            sheet.paste(tile, corner)
    sheet.save(path)


def seconds_of(images: Images, vectors_ND: torch.Tensor) -> float:
    """Return the CPU time of looking for near-duplicates, which depends little on what else the machine does."""
    began = time.process_time()
    kept_images(images, vectors_ND)
    return time.process_time() - began


def times(images: Images, data: Path | None) -> Iterator[str]:
    """Yield lines: the time for photos and, where it is given, for CIFAR-10."""
    some = images.select(range(min(TIMED, len(images))))
    yield f"{len(some):,} photos with features of {some.shape[0]}: {seconds_of(some, torch.empty(0)):.1f} s of CPU time"
    if data is None:
        return
    small = load_images(open_images(cifar10(data).pixels), (3, 32, 32))
    pixels = small.fetch(torch.arange(len(small)))
    means = F.avg_pool2d(pixels.float(), 4).flatten(1)
    vectors = means - means.mean(1, keepdim=True)
    seconds = seconds_of(small, vectors)
    yield f"{len(small):,} images of CIFAR-10 with vectors of {vectors.shape[1]}: {seconds:.1f} s of CPU time"


def main() -> None:
    """Measure both halves and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    lines = [
        "python benchmarks/duplicates.py FOLDER --work WORK --cifar10 DATA",
        f"commit {checked_out()}, {hardware('cpu')}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        f"features of lite0; {COPIED} copies of each kind per half; * MOST_BITS = {MOST_BITS}, chosen on 'choice'",
    ]
    for half in HALVES:
        place = half_of(arguments.folder, arguments.work, half)
        images = features_of(place, arguments.work)
        pairs, bits = compared(images)
        photos = sum(name.startswith("originals/") for name in images.ids)
        lines += ["", f"{half}: {photos:,} photos", *table(images, pairs, bits)]
        found = [pair for pair in pairs[bits <= MOST_BITS].tolist() if all(images.ids[i][0] == "o" for i in pair)]
        draw_sheet(images, np.array(found).reshape(-1, 2), place, arguments.work / f"{half}.png")
    lines += ["", *times(images, arguments.cifar10), *([arguments.note] if arguments.note else [])]
    write_text(RESULT, "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
