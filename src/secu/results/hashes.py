"""Perceptual hashes: the same picture has nearly the same hash if it was resized, recompressed, mirrored or cropped.

A hash has one bit for each low frequency of the gray picture: whether the coefficient of the discrete cosine transform
is positive. Mirroring flips the bits of every other frequency. Cropping changes all of them, so a picture also has a
hash for each of several windows, and the whole of one picture is compared with all windows of the other. Shapes: H
pictures of S × S pixels, F frequencies in each direction, W windows, P pairs of pictures.
"""

import numpy as np
from numpy.typing import NDArray

SIDE = 64  # S
FREQUENCIES = 12  # F
WHOLE = (0, SIDE)
SPANS = (WHOLE, (0, 62), (2, 62), (0, 60), (2, 60), (4, 60))  # start and length of windows in one direction, in pixels
FAR = 60  # of 143 bits that whole pictures may differ in; it was at most 59 in 400 copies that were cropped by 5%

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Hashes = NDArray[np.uint8]  # (H, W, F² / 8): eight bits in a byte, the whole picture first


def _waves(start: int, length: int) -> Floats:
    """Return the cosines of a discrete cosine transform (F, S) over a part of the pixels; zero for the others."""
    pixel_S = np.arange(SIDE) - start
    inside_S = (pixel_S >= 0) & (pixel_S < length)
    frequency_F1 = np.arange(FREQUENCIES)[:, None]
    waves_FS: Floats = (inside_S * np.cos(np.pi * frequency_F1 * (pixel_S + 0.5) / length)).astype(np.float32)
    return waves_FS


WAVES = np.concatenate([_waves(*span) for span in SPANS])  # (spans × F, S)
BOXES = [(0, 0), *((y, x) for y in range(1, len(SPANS)) for x in range(1, len(SPANS)))]  # spans of the windows
MIRROR = np.packbits(np.tile(np.arange(FREQUENCIES) % 2 == 1, FREQUENCIES))  # bits that change in a mirrored picture


def hash_pictures(gray_HSS: Floats) -> Hashes:
    """Return the hashes of gray pictures, one per window."""
    centered_HSS = gray_HSS - gray_HSS.mean((1, 2), keepdims=True)
    coefficients = WAVES @ centered_HSS @ WAVES.T
    bits = coefficients.reshape(-1, len(SPANS), FREQUENCIES, len(SPANS), FREQUENCIES) > 0
    windows = np.stack([bits[:, y, :, x] for y, x in BOXES], 1)
    windows[..., 0, 0] = False  # the mean brightness does not count
    return np.packbits(windows.reshape(*windows.shape[:2], FREQUENCIES**2), -1)


def differing_bits(hashes_HW: Hashes, one_P: Ints, other_P: Ints) -> Ints:
    """Return in how many bits the hashes of pairs of pictures differ (P,), mirrored or not, cropped or not.

    Only if the whole pictures are not too different, their windows are compared too.
    """
    bits_P = _least_bits(hashes_HW[one_P, :1], hashes_HW[other_P, :1])
    (near,) = np.nonzero(bits_P <= FAR)
    for whole, cropped in ((one_P[near], other_P[near]), (other_P[near], one_P[near])):
        bits_P[near] = np.minimum(bits_P[near], _least_bits(hashes_HW[whole, :1], hashes_HW[cropped]))
    return bits_P


def _least_bits(whole_P1: Hashes, windows_PW: Hashes) -> Ints:
    """Return in how many bits a hash or its mirror image differs from the most similar one of some windows (P,)."""
    least_P = np.full(len(whole_P1), FREQUENCIES**2)
    for flipped in (np.zeros_like(MIRROR), MIRROR):
        bits_PW = np.unpackbits(whole_P1 ^ flipped ^ windows_PW, axis=-1).sum(-1, dtype=np.uint8)  # at most 144
        least_P = np.minimum(least_P, bits_PW.min(-1))
    return least_P
