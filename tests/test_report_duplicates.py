"""Near-duplicates in the report: the groups, their number, and the section in a real browser where there is one."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from secu.data import Images
from secu.results.report import duplicates
from secu.results.report.duplicates import MOST_GROUPS, MOST_PICTURES, duplicate_groups
from test_report import hostile_ids, make_data, make_results, render

try:
    from test_report_browser import Keys, Page, driver  # noqa: F401
    from test_report_browser import pytestmark as needs_browser
except pytest.skip.Exception:
    needs_browser = pytest.mark.skip(reason="selenium is not installed: pip install selenium")

PIXELS = make_results().images.tensor


def results_of(same: list[int], **options):
    """Return results of images, of which each has the pixels of another one."""
    images = Images(PIXELS[torch.tensor(same) % len(PIXELS)], ids=options.pop("ids", ()))
    return make_results(len(same), labels=False, images=images, **options)


def data_of(same, **options):
    return replace(make_data(len(same), labels=False), results=results_of(same, **options))


def section_of(page: str) -> str | None:
    found = re.search(r'<section id="duplicates".*?</section>', page, re.S)
    return found and found[0]


def test_groups_are_the_largest_ones_with_the_picture_to_keep_first():
    same = [0, 1, 2, 1, 4, 1, 6, 6, 4, 9]
    results = results_of(same)
    assert results.duplicates == 4
    assert duplicate_groups(results) == {"groups": [[1, 3, 5], [4, 8], [6, 7]], "sizes": [3, 2, 2], "total": 3}


def test_the_number_of_groups_and_of_pictures_is_bounded(monkeypatch):
    monkeypatch.setattr(duplicates, "MOST_GROUPS", 2)
    monkeypatch.setattr(duplicates, "MOST_PICTURES", 3)
    found = duplicate_groups(results_of([0, 0, 2, 2, 2, 5, 5, 5, 5, 5]))
    assert found == {"groups": [[5, 6, 7], [2, 3, 4]], "sizes": [5, 3], "total": 3}


@pytest.mark.usefixtures("quick_map")
def test_very_many_groups_add_a_bounded_number_of_pictures_to_the_page():
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (900, 1, 8, 8), dtype=torch.uint8, generator=draw).repeat(9, 1, 1, 1)
    plain = make_data(8100, labels=False, images=Images(pixels))
    content = json.loads(re.search(r'id="content">(.*?)</script>', render(plain), re.S)[1])
    assert content["duplicates"]["total"] == 900
    assert len(content["duplicates"]["groups"]) == MOST_GROUPS
    assert all(len(group) == MOST_PICTURES for group in content["duplicates"]["groups"])
    cards = {i for card in content["clusters"] for kind in ("typical", "uncertain", "outlying") for i in card[kind]}
    assert content["onCards"] <= len(cards) + MOST_GROUPS * MOST_PICTURES
    assert set(np.concatenate(content["duplicates"]["groups"])) <= set(content["pictures"]["index"])


def test_nothing_is_shown_if_there_are_none():
    page = render(make_data())
    assert section_of(page) is None
    assert 'href="#duplicates"' not in page


@pytest.mark.parametrize(
    ("same", "text"), [([0, 0, 2], "1 image is the same"), ([0, 0, 0, 3], "2 images are the same")]
)
def test_the_section_says_how_many_there_are(same, text):
    page = render(data_of(same))
    assert text in section_of(page)
    assert 'href="#duplicates"' in page


# In a browser


@pytest.fixture
def page(request, tmp_path):
    path = tmp_path / "report.html"
    same = [*range(20), 0, 0, 0, 0, 0, 0, 5]
    path.write_text(render(data_of(same, ids=hostile_ids(27))), encoding="utf-8")
    opened = Page(request.getfixturevalue("driver"), path, tmp_path)
    opened.open()
    return opened


@needs_browser
def test_groups_are_shown_with_names_as_text_and_each_is_one_stop_of_the_keyboard(page):
    groups = page.all("#duplicates article")
    assert page.find("#duplicates-count").text == "2 groups."
    assert [group.find_element("css selector", "h3").text for group in groups] == ["7 images · 6 shown", "2 images"]
    assert "Kept: <img src=x onerror=alert(1)>" in groups[0].text
    assert groups[0].accessible_name == "Same picture as <img src=x onerror=alert(1)>"
    assert not groups[0].find_elements("css selector", "img")
    stops = page.script("return [...document.querySelectorAll('#duplicates .pic')].map(one => one.tabIndex)")
    assert stops == [0, -1, -1, -1, -1, -1, 0, -1]
    assert page.overflow() <= 0


@needs_browser
def test_a_picture_is_opened_and_marked_from_its_group(page):
    first = page.find("#duplicates .pic")
    page.script("arguments[0].focus()", first)
    page.press(Keys.ARROW_RIGHT)
    assert page.focused().get_attribute("data-index") == "20"
    page.press("w")
    assert "marked as wrong" in page.focused().get_attribute("aria-label")
    page.press(Keys.ENTER)
    assert page.find("#picture").get_attribute("open") is not None
    page.press(Keys.ARROW_RIGHT)
    assert page.find("#picture-title").text == "21.png"
