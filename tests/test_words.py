"""Suggested names against a slow oracle, and what must not be suggested."""

import math
import re

import numpy as np
import pytest

from secu.results import words
from secu.results.words import suggest_names


def oracle(texts, cluster, clusters):
    """Return suggestions with loops over sets."""
    has = [set(re.findall(words.WORD, text.lower())) for text in texts]
    found = []
    for c in range(clusters):
        inside = [own for own, other in zip(has, cluster, strict=True) if other == c]
        outside = [own for own, other in zip(has, cluster, strict=True) if other != c]
        scores = {}
        for word in set().union(*inside):
            many = sum(word in own for own in inside)
            share = many / len(inside)
            elsewhere = sum(word in own for own in outside)
            idf = math.log(1 + len(texts) / clusters / (many + elsewhere))
            if many >= 3 and share >= 0.2 and share >= 2 * elsewhere / max(1, len(outside)):
                scores[word] = share * idf
        found.append(sorted(scores, key=lambda word: (-scores[word], word))[:3])
    return found


@pytest.mark.parametrize("seed", range(5))
def test_suggestions_are_those_of_the_oracle(seed):
    draw = np.random.default_rng(seed)
    vocabulary = np.array(["cat", "dog", "sea", "sky", "red", "car", "tree", "house", "night", "snow"])
    cluster = draw.integers(0, 4, 200)
    favored = draw.integers(0, len(vocabulary), (4, 3))
    texts = [" ".join([*draw.choice(vocabulary, 2), *draw.choice(vocabulary[favored[c]], 2)]) for c in cluster]
    ids = [str(n) for n in range(200)]
    assert suggest_names(ids, {"caption": texts}, cluster, 4) == oracle(texts, cluster, 4)


def test_folders_and_file_names_count_but_counters_and_shared_words_do_not():
    ids = [f"animals/cats/IMG_{n:04}.jpg" for n in range(10)] + [f"animals\\dogs\\IMG_{n:04}.jpg" for n in range(10)]
    assert suggest_names(ids, {}, np.repeat([0, 1], 10), 2) == [["cats"], ["dogs"]]


def test_the_extension_is_no_word_but_a_folder_with_a_dot_is():
    ids = [f"{n}.jpeg" for n in range(5)] + [f"trip.rome/{n}.webp" for n in range(5)]
    assert suggest_names(ids, {}, np.repeat([0, 1], 5), 2) == [[], ["rome", "trip"]]


def test_letters_of_every_script_are_words():
    ids = [f"собака {n}.jpg" for n in range(5)] + [f"Ägypten {n}.jpg" for n in range(5)]
    assert suggest_names(ids, {}, np.repeat([0, 1], 5), 2) == [["собака"], ["ägypten"]]


@pytest.mark.parametrize(
    ("inside", "size", "outside", "suggested"),
    [
        (3, 10, 0, True),
        (2, 10, 0, False),  # too few images
        (4, 20, 0, True),
        (3, 20, 0, False),  # too small a share
        (8, 10, 40, True),
        (8, 10, 41, False),  # too frequent elsewhere
    ],
)
def test_a_word_needs_enough_images_a_share_and_a_contrast(inside, size, outside, suggested):
    texts = ["word"] * inside + [""] * (size - inside) + ["word"] * outside + [""] * (100 - outside)
    cluster = np.repeat([0, 1], [size, 100])
    found = suggest_names([""] * len(texts), {"text": texts}, cluster, 2)
    assert found[0] == (["word"] if suggested else [])


def test_without_words_nothing_is_suggested():
    columns = {"number": [1, 2, 3, 4], "none": [None] * 4}
    assert suggest_names(["0", "1", "2", "3"], columns, np.array([0, 0, 2, 2]), 3) == [[], [], []]


def test_very_many_images_are_sampled_and_very_long_texts_cut(monkeypatch):
    monkeypatch.setattr(words, "MOST_IMAGES", 40)
    monkeypatch.setattr(words, "MOST_TEXT", 30)
    texts = ["cat " + "x" * 10_000] * 500 + ["dog" + " " * 40 + "late"] * 500
    found = suggest_names([""] * 1000, {"caption": texts}, np.repeat([0, 1], 500), 2)
    assert found == [["cat", "x" * 26], ["dog"]]
