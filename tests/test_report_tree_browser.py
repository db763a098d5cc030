"""The tree, the filter and the map of clusters in a real browser; skipped where there is none."""

import csv
from collections import Counter

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import test_report_browser as browser
from secu.apps.sort import sort_run
from secu.base.names import unescape
from secu.results.edits import read_edits, read_rows
from secu.results.report import page as report_page
from test_report import HOSTILE, hostile_ids, write_page
from test_report_browser import CONTRAST, phone, prefer
from tree_reports import own_leaves, tree_data, with_empty_leaves

pytestmark = browser.pytestmark
driver = browser.driver
page = browser.page


@pytest.fixture(scope="module")
def trees():
    """What the reports are made from, by name."""
    nasty = {"title": HOSTILE[0], "class_names": HOSTILE[:4], "warnings": HOSTILE[:2]}
    return {
        "plain": tree_data(),
        "hostile": tree_data(60, 4, 12, ids=hostile_ids(60), **nasty),
        "many": tree_data(1500, 300, 500, side=4),
        "own": own_leaves(tree_data(labels=False)),
        "empty": with_empty_leaves(tree_data()),
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory, trees):
    folder = tmp_path_factory.mktemp("trees")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secu.results.report.layout.LEAST_POINTS", 10**9)  # a faster map
        for name, data in trees.items():
            write_page(folder / f"{name}.html", data)
        patch.setattr(report_page, "NAMES", 1000)
        write_page(folder / "nameless.html", trees["plain"])
    return {path.stem: path for path in folder.iterdir()}


def cut(page, groups):
    box = page.find("#level")
    box.clear()
    box.send_keys(str(groups))
    page.click("#cut")


def ids_of(page):
    return [card.get_attribute("id") for card in page.all(".card")]


def titles(page):
    return [card.get_attribute("aria-label") for card in page.all(".card")]


def size_of(card):
    return int(card.find_element(browser.By.CSS_SELECTOR, ".meters dd").text.replace(",", ""))


def sizes(page):
    return {card.get_attribute("aria-label"): size_of(card) for card in page.all(".card")}


@pytest.mark.parametrize("groups", [2, 5, 11])
def test_a_cut_shows_and_downloads_the_groups_of_that_level(page, trees, groups):
    leaves = trees["plain"].results.leaves
    expected = leaves.tree.cut(groups)[leaves.leaf].tolist()
    cut(page, groups)
    assert sizes(page) == {f"Cluster {group}": many for group, many in sorted(Counter(expected).items())}
    assert titles(page) == [f"Cluster {group}" for group in range(groups)]
    assert f"secu sort --level {groups}" in page.find("#cut-note").text
    rows = page.download()
    assert [int(row["merged_cluster"]) for row in rows] == expected
    assert [int(row["leaf"]) for row in rows] == leaves.tree.leaves[leaves.leaf].tolist()
    own = trees["plain"].results.predictions.cluster.tolist()
    edits = read_edits(page.downloads / "names.csv", 5, dict(zip(trees["plain"].ids, own, strict=True)))
    digits = len(str(groups - 1))
    assert [edits.folder(name, 0) for name in trees["plain"].ids] == [f"cluster-{g:0{digits}d}" for g in expected]
    page.click("#uncut")
    assert titles(page) == [f"Cluster {cluster}" for cluster in range(5)]
    assert list(page.download()[0]) == ["id", "cluster", "name", "merged_cluster", "marked_wrong"]


def splittable(page):
    return [int(button.get_attribute("data-split")) for button in page.all("[data-split]")]


def test_a_cluster_is_split_named_merged_and_joined_again(page, trees):
    before = sizes(page)
    cluster = splittable(page)[0]
    page.click(f"[data-split='{cluster}']")
    after = sizes(page)
    parts = {f"Cluster {cluster}{letter}" for letter in "ab"}
    assert set(after) - set(before) == parts
    assert sum(after[part] for part in parts) == before[f"Cluster {cluster}"]
    assert page.focused().get_attribute("aria-label") == f"Cluster {cluster}a"
    assert "1 split" in page.find("#edits").text
    page.press(Keys.TAB, "stripes", Keys.ENTER)
    page.reload()
    assert sizes(page) == after
    rows = page.download()
    assert Counter(row["merged_cluster"] for row in rows) == Counter(
        {title.removeprefix("Cluster "): many for title, many in after.items() if many}
    )
    assert {row["name"] for row in rows if row["merged_cluster"] == f"{cluster}a"} == {"stripes"}
    assert all(row["merged_cluster"].rstrip("ab") == row["cluster"] for row in rows)
    unit = page.find(f"[aria-label='Cluster {cluster}b']").get_attribute("id")[5:]
    other = next(k for k in range(5) if k != cluster and before[f"Cluster {k}"])
    page.merge(unit, other)
    assert sizes(page)[f"Cluster {other}"] == before[f"Cluster {other}"] + after[f"Cluster {cluster}b"]
    merged = Counter(row["merged_cluster"] for row in page.download())
    assert merged[str(other)] == before[f"Cluster {other}"] + after[f"Cluster {cluster}b"]
    page.click("#undo")
    page.click("[data-join]")
    assert sizes(page) == before
    page.click("#undo")
    assert sizes(page) == after


def test_a_part_is_split_again_down_to_its_leaves(page, trees):
    content = page.content()
    counts = Counter(content["tree"]["parent"])
    cluster = max(counts, key=counts.get)
    for _ in range(counts[cluster] - 1):
        inner = next(unit for unit in splittable(page) if is_part(page, unit, cluster))
        page.click(f"[data-split='{inner}']")
    rows = page.download()
    home = {row["merged_cluster"] for row in rows if row["cluster"] == str(cluster)}
    assert len(home) == counts[cluster]
    own = {leaf for leaf, parent in enumerate(content["tree"]["parent"]) if parent == cluster}
    parts = content["tree"]["parts"]
    found = Counter(row["merged_cluster"] for row in rows if row["cluster"] == str(cluster))
    assert sorted(found.values()) == sorted(parts["size"][leaf] for leaf in own)


def is_part(page, unit, cluster):
    return page.find(f"#card-{unit}").get_attribute("aria-label").rstrip("ab") == f"Cluster {cluster}"


def test_branches_of_a_cut_are_split_and_joined_in_the_tree(page, trees):
    cut(page, 4)
    button = page.find("#branches").find_element(browser.By.XPATH, ".//button[text()='Split']")
    unit = button.find_element(browser.By.XPATH, "./ancestor::*[@role='row']").get_attribute("data-unit")
    button.click()
    assert len(page.all(".card")) == 5
    page.click(f"#branches [data-unit='{unit}'] button")  # joins what was split
    assert "secu sort --level 4" in page.find("#cut-note").text
    page.click("#undo")
    assert len(page.all(".card")) == 5
    assert "secu sort" not in page.find("#cut-note").text
    groups = [int(row["merged_cluster"]) for row in page.download()]
    assert sorted(set(groups)) == list(range(5))
    leaf = trees["plain"].results.leaves.leaf.tolist()
    assert len(set(zip(leaf, groups, strict=True))) == len(set(leaf))  # groups consist of whole leaves
    first = [groups[leaf.index(place)] for place in range(max(leaf) + 1)]
    assert list(dict.fromkeys(first)) == list(range(5))  # numbered by their first leaf
    joins = page.find("#branches").find_elements(browser.By.XPATH, ".//button[text()='Join']")
    joins[0].click()
    assert len(page.all(".card")) < 5
    page.click("#undo")
    page.click("#undo")
    assert len(page.all(".card")) == 4
    assert "secu sort --level 4" in page.find("#cut-note").text


def test_the_tree_is_walked_by_keyboard(page):
    page.script("document.getElementById('tree').scrollIntoView()")
    page.wait(lambda: page.all("#branches [role=row]"))
    first = page.find("#branches [role=row]")
    first.send_keys(Keys.ARROW_LEFT)
    assert len(page.all("#branches [role=row]")) == 1
    assert page.focused().get_attribute("aria-expanded") == "false"
    page.press(Keys.ARROW_RIGHT)
    assert len(page.all("#branches [role=row]")) > 3  # what was open before
    assert page.focused().get_attribute("aria-expanded") == "true"
    page.press(Keys.ARROW_RIGHT)
    assert page.focused().get_attribute("aria-level") == "2"
    page.press(Keys.ARROW_LEFT)
    if page.focused().get_attribute("aria-level") == "2":
        page.press(Keys.ARROW_LEFT)
    assert page.focused().get_attribute("aria-level") == "1"
    page.press(Keys.END)
    assert page.focused() == page.all("#branches [role=row]")[-1]
    assert len(page.all("#branches [role=row][tabindex='0']")) == 1
    cut(page, 3)
    row = page.find("#branches .branch.active[aria-expanded]")
    row.send_keys(Keys.TAB)
    assert page.focused().text == "Show card"
    page.press(Keys.TAB)
    assert page.focused().text == "Split"
    page.press(Keys.ENTER)
    assert len(page.all(".card")) == 4


def test_the_navigation_arrives_below_the_tree(page):
    """Rows that change their height when they come into view would move everything after them."""
    page.wait(lambda: page.all("#branches [role=row]"))
    page.click("nav a[href='#map']")
    page.wait(lambda: page.find("nav a[href='#map']").get_attribute("aria-current"))
    assert 0 <= page.script("return document.getElementById('map').getBoundingClientRect().top") < 60


def test_rows_have_the_roles_of_a_treegrid(page):
    page.script("document.getElementById('tree').scrollIntoView()")
    page.wait(lambda: page.all("#branches [role=row]"))
    assert page.find("#branches").get_attribute("role") == "treegrid"
    for row in page.all("#branches > *"):
        assert row.get_attribute("role") == "row"
        assert int(row.get_attribute("aria-level")) >= 1
        assert {cell.get_attribute("role") for cell in row.find_elements(browser.By.XPATH, "./*")} == {"gridcell"}
        assert ("leaves" in row.text) == (row.get_attribute("aria-expanded") is not None)


def test_the_slider_sets_the_number_and_the_button(page):
    slider = page.find("#slider")
    slider.send_keys(Keys.HOME)
    assert page.find("#level").get_attribute("value") == "2"
    assert page.find("#cut").text == "Cut into 2 groups"
    slider.send_keys(Keys.END)
    leaves = len(page.content()["tree"]["numbers"])
    assert page.find("#level").get_attribute("value") == str(leaves)
    assert slider.get_attribute("aria-valuetext") == f"{leaves} groups"
    cut(page, 999)
    assert len(page.all(".card")) == leaves


def test_the_table_of_a_run_comes_back_with_its_parts(page, reports, trees, tmp_path):
    data = trees["plain"]
    page.open(reports["nameless"])
    assert page.content()["leaf"] is None
    cut(page, 6)
    leaves = data.results.leaves
    numbers = leaves.tree.leaves[leaves.leaf].tolist()
    lines = zip(data.ids, data.results.predictions.cluster.tolist(), numbers, strict=True)
    with (tmp_path / "assignments.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "cluster", "leaf"), *lines])
    (tmp_path / "bare.csv").write_text(
        "".join(
            f"{name},{k}\n"
            for name, k in [("id", "cluster"), *zip(data.ids, data.results.predictions.cluster.tolist(), strict=True)]
        )
    )
    (page.downloads / "names.csv").unlink(missing_ok=True)
    page.click("#download")
    page.find("#table").send_keys(str(tmp_path / "bare.csv"))  # of an earlier version
    page.wait(lambda: page.find("#table-note").is_displayed())
    page.find("#table").send_keys(str(tmp_path / "assignments.csv"))
    page.wait((page.downloads / "names.csv").exists)
    rows = read_rows(page.downloads / "names.csv", 5)
    assert [int(row.merged) for row in rows] == leaves.tree.cut(6)[leaves.leaf].tolist()


def test_leaves_that_are_the_clusters_are_grouped_but_not_split(page, reports, trees):
    page.open(reports["own"])
    assert splittable(page) == []
    cut(page, 3)
    leaves = trees["own"].results.leaves
    assert [int(row["merged_cluster"]) for row in page.download()] == leaves.tree.cut(3)[leaves.leaf].tolist()
    Select(page.find("#map-kind")).select_by_value("clusters")
    assert "3 clusters by their centers" in page.find("#map-count").text


def test_groups_without_images_have_cards_but_no_dots(page, reports, trees):
    page.open(reports["empty"])
    leaves = trees["empty"].results.leaves
    cut(page, len(leaves.centers))
    sizes_now = sizes(page)
    assert len(sizes_now) == len(leaves.centers)
    assert 0 in sizes_now.values()
    assert "This cluster is empty" in page.find("#cards").text
    Select(page.find("#map-kind")).select_by_value("clusters")
    filled = sum(size > 0 for size in sizes_now.values())
    assert f"{filled} clusters by their centers" in page.find("#map-count").text
    assert [int(row["merged_cluster"]) for row in page.download()] == leaves.leaf.tolist()


def test_the_map_follows_and_shows_clusters_that_lead_to_their_cards(page):
    Select(page.find("#map-kind")).select_by_value("clusters")
    assert "5 clusters by their centers" in page.find("#map-count").text
    assert "Map of the clusters" in page.find("#map-canvas").get_attribute("aria-label")
    canvas = page.find("#map-canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    if not page.find("#map-tip").is_displayed():
        canvas.send_keys(Keys.ARROW_LEFT)
    said = page.find("#announce").get_attribute("textContent")
    assert "confidence" in said
    canvas.send_keys(Keys.ENTER)
    assert page.focused().get_attribute("aria-label") == said.partition(",")[0]
    cut(page, 7)
    assert "7 clusters by their centers" in page.find("#map-count").text
    Select(page.find("#map-kind")).select_by_value("images")
    assert "All 240 images" in page.find("#map-count").text
    page.hover(17)
    assert "confidence" not in page.find("#map-tip").text
    group = page.find("#map-tip span").text
    ActionChains(page.driver).click().perform()
    assert group in page.find("#picture .facts").text
    assert "Second choice" not in page.find("#picture .facts").text


def test_a_click_on_a_dot_goes_to_its_card(page):
    places = page.content()["centers"]
    Select(page.find("#map-kind")).select_by_value("clusters")
    canvas = page.find("#map-canvas")
    page.script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width, height = page.script("return [arguments[0].clientWidth, arguments[0].clientHeight]", canvas)
    across, down = (min(side, 1.6 * min(width, height)) - 56 for side in (width, height))
    x, y = round((places["x"][3] - 0.5) * across), round((places["y"][3] - 0.5) * down)
    ActionChains(page.driver).move_to_element_with_offset(canvas, x, y).click().perform()
    assert page.focused().get_attribute("id") == "card-3"


def type_into(page, selector, text):
    box = page.find(selector)
    box.clear()
    box.send_keys(text)


def test_clusters_are_filtered_by_size_and_confidence(page, reports):
    assert not page.find("#filter").is_displayed()  # of five
    page.open(reports["many"])
    cards = page.content()["clusters"]
    type_into(page, "#size-least", "5")
    type_into(page, "#size-most", "6")
    known = sorted(round(100 * card["confidence"]) for card in cards if card["size"])
    middle = known[len(known) // 2]
    type_into(page, "#confidence-least", str(middle))
    wanted = [k for k, c in enumerate(cards) if 5 <= c["size"] <= 6 and round(100 * c["confidence"]) >= middle]
    assert 0 < len(wanted) < 290
    assert f"{len(wanted)} of 300 clusters shown" in page.find("#found").text
    assert ids_of(page) == [f"card-{k}" for k in wanted[:24]]
    type_into(page, "#size-least", "500")
    assert "No cluster matches" in page.find("#cards").text
    page.click("#clear-filter")
    assert len(page.all(".card")) == 24
    assert page.find("#found").text == ""
    type_into(page, "#size-most", "1")
    page.script("document.querySelectorAll('#sizes .pick')[0].click()")  # the largest: the filter gives way
    assert page.focused().get_attribute("class") == "card"
    cut(page, 200)
    assert not page.find("#confidence-limits").is_displayed()


def test_a_search_finds_names_of_files_in_groups_and_parts(page, reports, trees):
    leaves = trees["plain"].results.leaves
    cut(page, 8)
    name = trees["plain"].ids[100]
    page.find("#search").send_keys(name)
    assert titles(page) == [f"Cluster {int(leaves.tree.cut(8)[leaves.leaf[100]])}"]
    type_into(page, "#search", "7")
    assert titles(page)[0] == "Cluster 7"


def test_a_large_tree_shows_its_rows_a_page_at_a_time(page, reports):
    page.open(reports["many"])
    leaves = len(page.content()["tree"]["numbers"])
    cut(page, leaves)
    page.script("document.getElementById('tree').scrollIntoView()")
    page.wait(lambda: page.all("#branches [role=row]"))
    for _ in range(12):
        if page.all("#branches [aria-expanded=false]"):
            page.script("document.querySelectorAll('#branches [aria-expanded=false] .twisty')[0].click()")
    assert page.script("return document.querySelectorAll('#branches [role=row]').length") <= 100
    assert len(page.all(".card")) == 24


@pytest.mark.parametrize("report", ["plain", "hostile", "many"])
def test_a_phone_never_scrolls_sideways_in_the_tree(page, reports, report):
    phone(page)
    page.open(reports[report])
    cut(page, 9)
    page.script("document.getElementById('tree').scrollIntoView()")
    page.wait(lambda: page.all("#branches [role=row]"))
    assert page.overflow() <= 0
    small = """return [...document.querySelectorAll('button, input, select')]
        .filter(e => e.checkVisibility() && !e.matches('.check input, .part button, table button'))
        .map(e => [e.outerHTML.slice(0, 80), Math.min(e.offsetWidth, e.offsetHeight)]).filter(e => e[1] < 24)"""
    assert page.script(small) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_tree_has_contrast_in_both_themes(page, reports, theme):
    prefer(page, theme)
    page.open(reports["many"])
    page.script("document.getElementById('tree').scrollIntoView()")
    page.wait(lambda: page.all("#branches [role=row]"))
    assert page.script(CONTRAST) == []
    cut(page, 5)
    page.click("#branches .twisty:not(.leaf)")
    assert page.script(CONTRAST) == []


def test_hostile_names_stay_text_in_the_tree(page, reports, trees):
    page.open(reports["hostile"])
    cut(page, 6)
    unit = ids_of(page)[0][5:]
    page.name(unit, HOSTILE[0])
    page.wait(lambda: HOSTILE[0] in page.find("#branches").text)
    assert page.all("img, iframe, object") == []
    rows = page.download()
    assert [unescape(row["id"].removeprefix("'")) for row in rows[: len(HOSTILE)]] == [
        name.removeprefix("'") for name in HOSTILE
    ]
    assert {row["name"] for row in rows if row["merged_cluster"] == "0"} == {HOSTILE[0]}


@pytest.mark.parametrize(
    "kept",
    [
        '{"cut": {"level": 99999}, "open": {"7": 1, "x": 1, "99999": 1, "6": 5}}',
        '{"cut": {"level": 3, "other": 4}, "open": {"0": 1}, "merged": {"0": 99, "20": 21, "21": 20}}',
        '{"cut": [], "open": null, "undo": [[["cut", "level", "x"]]]}',
        '{"undo": [[["merged", 1, 2], ["merged", 2, 1]], [["open", 0, 1]]]}',
    ],
)
def test_kept_cuts_that_are_damaged_do_no_harm(page, kept):
    key = f"secu-report-{page.content()['fingerprint']}"
    page.script("localStorage.setItem(arguments[0], arguments[1])", key, kept)
    page.reload()
    cut(page, 4)
    assert len(page.all(".card")) == 4
    page.click("#uncut")
    assert len(page.all(".card")) in (4, 5, 6)
    page.click("#undo")
    assert len(page.all(".card")) == 4


def test_a_split_in_the_report_becomes_folders(page, tiny_digits, tmp_path):
    page.open(tiny_digits.path / "report.html")
    page.script("localStorage.clear()")
    page.reload()
    cluster = splittable(page)[0]
    page.click(f"[data-split='{cluster}']")
    first = page.focused().get_attribute("id")[5:]
    page.name(first, "first half")
    rows = page.download()
    assert sort_run(tiny_digits, tmp_path / "sorted", copy=True, names=page.downloads / "names.csv") == 1797
    folders = {folder.name: len(list(folder.iterdir())) for folder in (tmp_path / "sorted").iterdir()}
    expected = Counter(row["name"].replace(" ", "_") or f"cluster-{row['merged_cluster']}" for row in rows)
    assert folders == expected
    assert folders["first_half"] + folders[f"cluster-{cluster}b"] == sum(row["cluster"] == str(cluster) for row in rows)
