"""The report in a real browser: Debian's chromium, headless, driven by selenium; skipped where either is missing."""

import csv
import json
import time
from pathlib import Path

import pytest
import torch

from secu.base.names import escape
from secu.results.cells import disarm
from secu.results.edits import read_rows
from secu.results.report import page as report_page
from test_report import HOSTILE, hostile_ids, make_data, write_page

selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")

from selenium import webdriver  # noqa: E402
from selenium.webdriver import ActionChains  # noqa: E402
from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

BROWSER, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER.exists() and DRIVER.exists()),
    reason=f"no {BROWSER} or {DRIVER}: apt-get install chromium chromium-driver",
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
)


class Page:
    """A report in the browser, and what a person does with it."""

    def __init__(self, driver, path, downloads):
        self.driver = driver
        self.path = path
        self.downloads = downloads

    def open(self, path=None):
        self.driver.get((path or self.path).as_uri())
        self.wait(lambda: self.script("return document.querySelectorAll('.card').length > 0"))

    def reload(self):
        self.driver.refresh()
        self.wait(lambda: self.script("return document.querySelectorAll('.card').length > 0"))

    def wait(self, condition):
        return WebDriverWait(self.driver, 60, poll_frequency=0.05).until(lambda _: condition())

    def script(self, code, *arguments):
        return self.driver.execute_script(code, *arguments)

    def devtools(self, command, **parameters):
        return self.driver.execute_cdp_cmd(command, parameters)

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, *keys):
        ActionChains(self.driver).send_keys(*keys).perform()

    def undo_by_keys(self):
        ActionChains(self.driver).key_down(Keys.CONTROL).send_keys("z").key_up(Keys.CONTROL).perform()

    def click(self, selector):
        element = self.find(selector)
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def focused(self):
        return self.driver.switch_to.active_element

    def name(self, cluster, text):
        box = self.find(f"#name-{cluster}")
        box.clear()
        box.send_keys(text, Keys.ENTER)

    def merge(self, cluster, into):
        self.click(f"[data-compare='{cluster}']")
        Select(self.find("#compare-with")).select_by_value(str(into))
        self.click("#merge")

    def content(self):
        return json.loads(self.script("return document.getElementById('content').textContent"))

    def download(self):
        file = self.downloads / "names.csv"
        file.unlink(missing_ok=True)
        self.click("#download")
        self.wait(file.exists)
        with file.open(newline="", encoding="utf-8") as lines:
            return list(csv.DictReader(lines))

    def spot(self, place):
        """Where a point of the map lies, seen from the middle of the canvas, while all of it is in view."""
        points, canvas = self.content()["map"], self.find("#map-canvas")
        width, height = self.script("return [arguments[0].clientWidth, arguments[0].clientHeight]", canvas)
        short = min(width, height)
        across, down = (min(side, 1.6 * short) - 56 for side in (width, height))
        return (points["x"][place] / 10_000 - 0.5) * across, (points["y"][place] / 10_000 - 0.5) * down

    def hover(self, place):
        canvas = self.find("#map-canvas")
        self.script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        x, y = self.spot(place)
        ActionChains(self.driver).move_to_element_with_offset(canvas, round(x), round(y)).perform()
        self.wait(lambda: self.find("#map-tip").is_displayed())

    def overflow(self):
        return self.script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    options = Options()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    browser.set_page_load_timeout(60)
    downloads = folder / "downloads"
    downloads.mkdir()
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    browser.downloads = downloads
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    names = ("plain", "hostile", "many", "mixed", "worded", "large", "long")
    paths = {name: folder / f"{name}.html" for name in names}
    write_page(paths["plain"], make_data(240, 5))
    nasty = {"title": HOSTILE[0], "class_names": HOSTILE[:4], "warnings": HOSTILE[:2]}
    write_page(paths["hostile"], make_data(60, 4, ids=hostile_ids(60), **nasty))
    write_page(paths["many"], make_data(1500, 300, dim=12, side=4))
    place = torch.arange(800) % 40
    targets = torch.arange(800) // 40
    rising = (place < 2 * targets + 1).long()  # the share of cluster 0 rises from label to label
    write_page(paths["mixed"], make_data(800, 2, targets=targets, class_names=(), cluster=rising))
    words = ("cats", "dogs", "birds")
    write_page(paths["worded"], make_data(90, 3, ids=[f"{words[i % 3]}/{i}.png" for i in range(90)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_page, "NAMES", 1000)
        write_page(paths["large"], make_large())
        patch.setattr("secu.results.report.layout.LEAST_POINTS", 10**9)  # a faster map
        write_page(paths["long"], make_long())
    return paths


def make_large():
    return make_data(2100, 5, ids=[f'a "b",\\n/{i}.png' for i in range(2100)])


def make_long():
    """Names that differ in their middle alone, which is not shown, and start like a formula."""
    return make_data(2100, 5, ids=[f"={'猫😀' * 600}{i}{'x' * 1200}" for i in range(2100)])


@pytest.fixture
def page(driver, reports):
    """A fresh report on a laptop, and no error in the console at the end."""
    page = Page(driver, reports["plain"], driver.downloads)
    page.devtools("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    prefer(page, "light")
    page.open()
    page.script("localStorage.clear()")
    page.reload()
    yield page
    errors = [line for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    assert errors == []


def prefer(page, theme):
    wanted = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wanted.items()]
    page.devtools("Emulation.setEmulatedMedia", features=features)


def phone(page):
    page.devtools("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)


def test_it_draws_everything_and_requests_nothing(page):
    assert len(page.all(".card")) == 5
    page.wait(lambda: len(page.all("#charts svg")) == 4)
    assert len(page.all(".heat tbody tr")) == 5
    assert page.script("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:'))") == []
    drawn = """
const empty = Object.assign(document.createElement("canvas"), {width: arguments[0].width, height: arguments[0].height});
return arguments[0].toDataURL() !== empty.toDataURL();
"""
    page.wait(lambda: page.script(drawn, page.find(".card canvas")))
    page.wait(lambda: page.script(drawn, page.find("#map-canvas")))


def test_the_policy_stops_what_is_not_ours(page):
    code = "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);"
    page.script(code)
    assert page.script("return window.hacked") is None
    assert any("Content Security Policy" in line["message"] for line in page.driver.get_log("browser"))


def test_a_cluster_is_named_and_the_name_goes_everywhere_and_survives_a_reload(page):
    page.name(2, "Cats & <b>dogs</b>")
    assert "Cats & <b>dogs</b>" in page.find("#announce").get_attribute("textContent")
    page.wait(lambda: "Cats & <b>dogs</b> (cluster 2)" in page.find("#map-cluster").text)
    assert any("Cats & <b>dogs</b>" in chip.text for chip in page.all(".chip"))
    page.reload()
    assert page.find("#name-2").get_attribute("value") == "Cats & <b>dogs</b>"
    assert "1 cluster named" in page.find("#edits").text
    page.click("#undo")
    assert page.find("#name-2").get_attribute("value") == ""
    assert not page.find("#undo").is_enabled()


def test_a_suggested_name_is_taken_by_a_click_and_found_by_search(page, reports):
    assert "Suggested name" not in page.find("#cards").text  # all of its images have the same words
    page.open(reports["worded"])
    assert [page.find(f"#card-{cluster} .labels button").text for cluster in range(3)] == ["cats", "dogs", "birds"]
    page.click("#card-1 .labels button")
    assert page.find("#name-1").get_attribute("value") == "dogs"
    page.wait(lambda: "dogs (cluster 1)" in page.find("#map-cluster").text)
    page.find("#search").send_keys("birds")
    page.wait(lambda: page.all("#card-2") and not page.all("#card-0"))


def test_two_clusters_are_merged_separated_and_merged_back_by_undo(page):
    content = page.content()
    sizes = [card["size"] for card in content["clusters"]]
    page.name(1, "ones")
    page.merge(1, 3)
    assert len(page.all(".card")) == 4
    assert page.find("#card-3 .meters dd").text == str(sizes[1] + sizes[3])
    assert page.find("#name-3").get_attribute("value") == "ones"
    assert page.focused().get_attribute("id") == "card-3"
    page.merge(3, 0)
    assert len(page.all(".card")) == 3
    page.reload()
    assert len(page.all(".card")) == 3
    page.click("#card-0 .part button")
    assert len(page.all(".card")) == 4
    page.click("#undo")
    assert len(page.all(".card")) == 3
    for _ in range(3):
        page.click("#undo")
    assert len(page.all(".card")) == 5
    assert page.find("#name-1").get_attribute("value") == ""


def test_a_picture_is_opened_marked_as_wrong_and_unmarked(page):
    page.click("#card-0 .pic")
    index = page.content()["clusters"][0]["typical"]
    assert page.find("#picture-title").text == page.content()["ids"][index[0]]
    page.click("#mark")
    assert page.find("#mark").text == "Unmark"
    page.press(Keys.ARROW_RIGHT)
    assert page.find("#picture-title").text == page.content()["ids"][index[1]]
    page.press("w")
    page.press(Keys.ESCAPE)
    assert not page.find("#picture").is_displayed()
    assert len(page.find("#card-0 .strip").find_elements(By.CSS_SELECTOR, ".wrong")) == 2
    assert "marked as wrong" in page.find("#card-0 .pic").get_attribute("aria-label")
    page.reload()
    assert "2 images marked as wrong" in page.find("#edits").text
    page.undo_by_keys()
    assert "1 image marked as wrong" in page.find("#edits").text
    page.click("#clear")
    assert "no changes" in page.find("#edits").text
    page.click("#toast-undo")
    assert "1 image marked as wrong" in page.find("#edits").text


def test_the_download_has_every_picture_and_every_edit(page):
    content = page.content()
    page.name(4, 'say "four", please')
    page.merge(2, 4)
    page.find("#card-0 .pic").send_keys("w")
    wrong = content["clusters"][0]["typical"][0]
    rows = page.download()
    assert len(rows) == 240
    for index, row in enumerate(rows):
        cluster = content["cluster"][index]
        merged = 4 if cluster == 2 else cluster
        assert row == {
            "id": content["ids"][index],
            "cluster": str(cluster),
            "name": 'say "four", please' if merged == 4 else "",
            "merged_cluster": str(merged),
            "marked_wrong": "yes" if index == wrong else "no",
        }


def write_table(path, data, order=lambda rows: rows):
    """Write assignments.csv as a run does, up to the columns that the page ignores."""
    found = data.results.predictions
    rows = zip(data.ids, found.cluster.tolist(), found.confidence.tolist(), strict=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "cluster", "confidence"])
        writer.writerows([disarm(cell) for cell in row] for row in order(list(rows)))


@pytest.fixture
def large(page, reports, tmp_path):
    """A report of more pictures than it holds names of, and the table beside it."""
    data = make_large()
    write_table(tmp_path / "assignments.csv", data)
    page.open(reports["large"])
    assert page.content()["ids"] is None
    return page, data, tmp_path


def test_names_that_are_too_long_to_be_held_come_back_whole_and_marks_stay_with_their_picture(page, reports, tmp_path):
    data = make_long()
    page.open(reports["long"])
    shown = page.content()["pictures"]["name"]
    assert len(shown[0]) == page.content()["pictures"]["nameLength"]
    assert len(set(shown)) == 1
    page.find("#card-0 .pic").send_keys("w")
    wrong = page.content()["clusters"][0]["typical"][0]
    (page.downloads / "names.csv").unlink(missing_ok=True)
    page.click("#download")
    write_table(tmp_path / "assignments.csv", data, order=lambda rows: rows[::-1])
    page.find("#table").send_keys(str(tmp_path / "assignments.csv"))
    page.wait(lambda: page.find("#table-note").is_displayed())  # in another order, nobody can tell them apart
    write_table(tmp_path / "assignments.csv", data)
    page.click("#close-table")
    page.click("#download")
    page.find("#table").send_keys(str(tmp_path / "assignments.csv"))
    page.wait((page.downloads / "names.csv").exists)
    rows = read_rows(page.downloads / "names.csv", 5)
    assert [row.id for row in rows] == list(data.ids)
    assert [index for index, row in enumerate(rows) if row.wrong] == [wrong]


def test_the_download_of_very_many_pictures_takes_the_table_and_gives_it_back_with_the_edits(large):
    page, data, folder = large
    page.name(4, "four")
    page.merge(2, 4)
    page.find("#card-0 .pic").send_keys("w")
    wrong = page.content()["clusters"][0]["typical"][0]
    (page.downloads / "names.csv").unlink(missing_ok=True)
    page.click("#download")
    assert page.find("#table-dialog").is_displayed()
    page.find("#table").send_keys(str(folder / "assignments.csv"))
    page.wait((page.downloads / "names.csv").exists)
    assert not page.find("#table-dialog").is_displayed()
    with (page.downloads / "names.csv").open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["id"] for row in rows] == list(data.ids)
    for index, row in enumerate(rows):
        cluster = int(data.results.predictions.cluster[index])
        merged = 4 if cluster == 2 else cluster
        edits = {"name": "four" if merged == 4 else "", "merged_cluster": str(merged)}
        assert row == {"id": data.ids[index], "cluster": str(cluster)} | edits | {
            "marked_wrong": "yes" if index == wrong else "no"
        }
    assert "A sample of 2,000 of 2,100 images" in page.find("#map-count").text


@pytest.mark.parametrize("table", ["", "id,cluster\n", "path;cluster\n1;2\n", "other", "far"])
def test_another_table_is_refused(large, table):
    page, data, folder = large
    if table in ("other", "far"):
        cluster = data.results.predictions.cluster
        clusters = ((cluster + 1) % 5 if table == "other" else cluster + 5).tolist()
        pairs = zip(data.ids, clusters, strict=True)
        table = "id,cluster\n" + "".join(f'"{name.replace(chr(34), chr(34) * 2)}",{c}\n' for name, c in pairs)
    (folder / "assignments.csv").write_text(table)
    page.click("#download")
    page.find("#table").send_keys(str(folder / "assignments.csv"))
    page.wait(lambda: page.find("#table-note").is_displayed())
    page.click("#close-table")
    assert not page.find("#table-dialog").is_displayed()


def test_hovering_on_the_map_shows_picture_and_name_and_a_click_opens_it(page):
    page.hover(17)
    tip = page.find("#map-tip")
    assert tip.find_element(By.TAG_NAME, "canvas").is_displayed()
    shown = tip.find_element(By.TAG_NAME, "strong").text
    assert shown in page.content()["ids"]
    assert "% confidence" in tip.text
    ActionChains(page.driver).click().perform()
    assert page.find("#picture-title").text == shown
    page.click("#close-picture")
    ActionChains(page.driver).move_to_element(page.find("#map-title")).perform()
    page.wait(lambda: not page.find("#map-tip").is_displayed())


def is_zoomed(page):
    return page.script("return document.getElementById('map-canvas').style.touchAction") == "none"


def test_the_map_zooms_by_wheel_buttons_keys_and_pinch_and_moves_by_drag(page):
    canvas = page.find("#map-canvas")
    page.script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    picture = "return arguments[0].toDataURL()"
    whole = page.script(picture, canvas)
    before = page.script("return scrollY")
    ActionChains(page.driver).move_to_element(canvas).scroll_from_origin(
        webdriver.common.actions.wheel_input.ScrollOrigin.from_element(canvas), 0, -300
    ).perform()
    page.wait(lambda: is_zoomed(page))
    assert page.script("return scrollY") == before
    near = page.script(picture, canvas)
    ActionChains(page.driver).drag_and_drop_by_offset(canvas, 90, 40).perform()
    page.wait(lambda: page.script(picture, canvas) not in (near, whole))
    assert not page.find("#picture").is_displayed()
    canvas.send_keys("0")
    page.wait(lambda: not is_zoomed(page))
    page.click("#zoom-in")
    page.wait(lambda: is_zoomed(page))
    page.click("#zoom-all")
    page.wait(lambda: not is_zoomed(page))
    canvas.send_keys("+")
    page.wait(lambda: is_zoomed(page))
    canvas.send_keys("-")
    page.wait(lambda: not is_zoomed(page))
    box = page.script("return arguments[0].getBoundingClientRect()", canvas)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    touch(page, *[[(x - apart, y), (x + apart, y)] for apart in (30, 60, 120)])
    page.wait(lambda: is_zoomed(page))


def touch(page, *steps):
    """Put fingers down, move them from step to step and lift them."""
    for kind, step in [("touchStart", steps[0]), *(("touchMove", step) for step in steps[1:]), ("touchEnd", [])]:
        fingers = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(step)]
        page.devtools("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)


def test_the_map_shows_pictures_highlights_a_cluster_and_colors_by_confidence(page):
    canvas, picture = page.find("#map-canvas"), "return arguments[0].toDataURL()"
    seen = {page.script(picture, canvas)}
    for change in (
        lambda: page.click("#map-pictures"),
        lambda: page.click("#card-1 .actions button:last-child"),
        lambda: Select(page.find("#map-color")).select_by_value("confidence"),
    ):
        change()
        page.wait(lambda: page.script(picture, canvas) not in seen)
        time.sleep(0.2)
        seen.add(page.script(picture, canvas))
    assert Select(page.find("#map-cluster")).first_selected_option.text == "Cluster 1"


def test_the_map_is_walked_by_keyboard(page):
    canvas = page.find("#map-canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    first = page.find("#announce").get_attribute("textContent")
    assert page.find("#map-tip").is_displayed()
    canvas.send_keys(Keys.ARROW_DOWN)
    second = page.find("#announce").get_attribute("textContent")
    assert first != second
    canvas.send_keys(Keys.ENTER)
    assert second.startswith(page.find("#picture-title").text)
    page.press(Keys.ESCAPE)
    assert page.focused() == canvas


def tab_to(page, wanted, most=60):
    for _ in range(most):
        if page.focused().get_attribute("id") == wanted:
            return
        page.press(Keys.TAB)
    raise AssertionError(f"{wanted} is not reached by Tab")


def test_naming_and_merging_need_no_pointer(page):
    page.script("document.getElementById('sort').focus()")
    tab_to(page, "name-0")
    page.press("first", Keys.ENTER)
    for _ in range(20):
        page.press(Keys.TAB)
        if page.focused().get_attribute("data-compare") == "0":
            break
    page.press(Keys.ENTER)
    assert page.find("#compare").is_displayed()
    tab_to(page, "compare-with")
    page.press(Keys.ARROW_DOWN)
    into = page.find("#compare-with").get_attribute("value")
    tab_to(page, "merge")
    page.press(Keys.ENTER)
    assert not page.find("#compare").is_displayed()
    assert page.focused().get_attribute("id") == f"card-{into}"
    assert page.find(f"#name-{into}").get_attribute("value") == "first"
    page.undo_by_keys()
    assert len(page.all(".card")) == 5


def test_a_row_of_pictures_is_one_stop_and_arrows_move_inside(page):
    page.find("#card-0 .pic").send_keys(Keys.ARROW_RIGHT)
    assert page.focused() == page.all("#card-0 .pic")[1]
    page.press("w")
    assert "wrong" in page.focused().get_attribute("class")
    page.press(Keys.ENTER)
    assert page.find("#picture").is_displayed()
    page.press(Keys.ESCAPE)
    assert page.focused() == page.all("#card-0 .pic")[1]
    assert len(page.find("#card-0 .strip").find_elements(By.CSS_SELECTOR, "[tabindex='0']")) == 1


@pytest.mark.parametrize("report", ["plain", "hostile", "many"])
def test_a_phone_never_scrolls_sideways(page, reports, report):
    phone(page)
    page.open(reports[report])
    assert page.script("return innerWidth") == 360
    assert page.overflow() <= 0
    page.script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.overflow() <= 0
    page.click(".pic")
    box = page.script("const b = document.getElementById('picture').getBoundingClientRect(); return [b.left, b.right]")
    assert 0 <= box[0] < box[1] <= 360
    assert page.overflow() <= 0
    page.click("#close-picture")
    page.click("[data-compare]")
    assert page.overflow() <= 0
    page.click("#close-compare")
    small = """return [...document.querySelectorAll('button, input, select')]
        .filter(e => e.checkVisibility() && !e.matches('.check input, .part button, table button'))
        .map(e => [e.outerHTML.slice(0, 80), Math.min(e.offsetWidth, e.offsetHeight)]).filter(e => e[1] < 24)"""
    assert page.script(small) == []


def test_hostile_names_are_shown_as_text(page, reports):
    page.open(reports["hostile"])
    assert page.find("h1").text == HOSTILE[0]
    assert page.all("img, iframe, object") == []
    assert len(page.all("script")) == 2
    content = page.content()
    seen = {}
    for button in page.all(".pic"):
        index = int(button.get_attribute("data-index"))
        if index >= len(HOSTILE) or index in seen:
            continue
        page.script("arguments[0].click()", button)
        seen[index] = page.script("return arguments[0].textContent", page.find("#picture-title"))
        page.click("#close-picture")
    assert len(seen) > 5
    assert seen == {index: escape(HOSTILE[index]) for index in seen}
    page.hover(0)
    assert page.find("#map-tip strong").text
    page.name(0, HOSTILE[0])
    page.name(1, "=1+1")
    page.merge(0, 2)
    assert page.all("img") == []
    rows = page.download()
    assert len(rows) == 60
    for index, name in enumerate(HOSTILE):
        wanted = ("'" if name[0] in "=+-@" else "") + escape(name)
        assert rows[index]["id"] == wanted
        assert rows[index]["cluster"] == str(content["cluster"][index])
    assert {row["name"] for row in rows if row["cluster"] == "1"} == {"'=1+1"}
    assert {row["name"] for row in rows if row["cluster"] == "0"} == {HOSTILE[0]}


CONTRAST = """
const dot = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
const pen = dot.getContext('2d', {willReadFrequently: true});
function rgba(color) {
  pen.clearRect(0, 0, 1, 1); pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data];
}
function background(element) {
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor);
  pen.clearRect(0, 0, 1, 1);
  for (const layer of layers) { pen.fillStyle = layer; pen.fillRect(0, 0, 1, 1); }
  return [...pen.getImageData(0, 0, 1, 1).data];
}
const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const poor = [];
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.matches('input:not([type=checkbox])');
  if (!own || !e.checkVisibility() || e.closest(':disabled, script, .hidden, option')) continue;
  const style = getComputedStyle(e), size = parseFloat(style.fontSize), bold = style.fontWeight >= 600;
  const text = rgba(e.namespaceURI.endsWith('svg') ? style.fill : style.color);
  const [a, b] = [light(text), light(background(e))].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
  const enough = size >= 24 || (size >= 18.66 && bold) ? 3 : 4.5;
  if (ratio < enough) poor.push([e.tagName, e.className, e.textContent.slice(0, 30), ratio]);
}
return poor;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("report", ["plain", "hostile", "mixed"])
def test_all_text_has_contrast_in_both_themes(page, reports, theme, report):
    prefer(page, theme)
    page.open(reports[report])
    page.script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.find("#card-0 .pic").send_keys("w")
    assert page.script(CONTRAST) == []
    page.click(".pic")
    assert page.script(CONTRAST) == []


def paper(page):
    return page.script("return getComputedStyle(document.body).backgroundColor")


def test_dark_follows_the_system_and_the_button_overrules_it(page):
    light = paper(page)
    prefer(page, "dark")
    page.wait(lambda: paper(page) != light)
    dark = paper(page)
    page.click("#theme")
    assert paper(page) == light
    page.reload()
    assert paper(page) == light
    page.click("#theme")
    assert paper(page) == dark
    prefer(page, "light")
    assert paper(page) == dark


def test_edits_work_where_the_browser_keeps_nothing(page):
    refuse = "get() { throw new DOMException('no', 'SecurityError'); }"
    block = f"Object.defineProperty(window, 'localStorage', {{ {refuse} }});"
    added = page.devtools("Page.addScriptToEvaluateOnNewDocument", source=block)
    try:
        page.reload()
        assert page.find("#blocked").is_displayed()
        page.name(0, "zero")
        page.merge(1, 0)
        page.click("#theme")
        assert {row["name"] for row in page.download() if row["merged_cluster"] == "0"} == {"zero"}
        page.click("#undo")
        assert len(page.all(".card")) == 5
    finally:
        page.devtools("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


@pytest.mark.parametrize(
    "kept",
    [
        "not json",
        "[]",
        "null",
        '{"names": {"length": "x", "99": "y", "0": 7}, "merged": {"0": 0, "1": 2, "2": 1, "toString": 1}, "wrong": 5}',
        '{"undo": [[["merged", 0]], 3, null]}',
    ],
)
def test_kept_edits_that_are_damaged_do_no_harm(page, kept):
    key = f"secu-report-{page.content()['fingerprint']}"
    page.script("localStorage.setItem(arguments[0], arguments[1])", key, kept)
    page.reload()
    page.name(0, "zero")
    assert page.find("#name-0").get_attribute("value") == "zero"
    page.click("#undo")
    assert len(page.all(".card")) in (4, 5)


def test_reports_do_not_share_their_edits(page, reports):
    page.name(0, "zero")
    page.open(reports["many"])
    assert page.find("#name-0").get_attribute("value") == ""


def test_three_hundred_clusters_are_searched_sorted_and_shown_a_page_at_a_time(page, reports):
    page.open(reports["many"])
    assert len(page.all(".card")) == 24
    page.click("#more")
    assert len(page.all(".card")) == 48
    box = page.find("#search")
    box.send_keys("217")
    assert page.find(".card").get_attribute("id") == "card-217"
    page.name(217, "blue birds")
    box.clear()
    box.send_keys("BIRDS blue")
    assert [card.get_attribute("id") for card in page.all(".card")] == ["card-217"]
    box.clear()
    content = page.content()
    wanted = content["ids"][7].upper()
    box.send_keys(wanted)
    held = {c for c, name in zip(content["cluster"], content["ids"], strict=True) if wanted.lower() in name.lower()}
    assert {card.get_attribute("id") for card in page.all(".card")} == {f"card-{cluster}" for cluster in held}
    box.clear()
    box.send_keys("nothing like it")
    assert page.all(".card") == []
    page.script("arguments[0].value = ''; arguments[0].dispatchEvent(new Event('input'))", box)
    cards = page.content()["clusters"]

    def shown(order):
        Select(page.find("#sort")).select_by_value(order)
        return [cards[int(card.get_attribute("id")[5:])] for card in page.all(".card")]

    for order, key, sign in (("large", "size", -1), ("small", "size", 1), ("loose", "cohesion", 1)):
        values = [sign * card[key] for card in shown(order) if card[key] is not None]
        assert values == sorted(values)
    for order, key, sign in (("tight", "cohesion", -1), ("uncertain", "confidence", 1)):
        values = [sign * card[key] for card in shown(order) if card[key] is not None]
        assert values == sorted(values)
    page.script("document.querySelectorAll('#sizes .pick')[299].click()")
    assert page.focused().get_attribute("class") == "card"


def test_curves_show_the_epoch_under_the_pointer_and_fit_when_the_window_changes(page):
    width = "return document.querySelector('#charts svg')?.getBoundingClientRect().width ?? 0"
    page.wait(lambda: page.script(width) > 0)
    drawing = page.find("#charts svg")
    page.script("arguments[0].scrollIntoView({block: 'center'})", drawing)
    ActionChains(page.driver).move_to_element(drawing).perform()
    page.wait(lambda: "Epoch" in page.find("#charts .legend").text)
    wide = page.script(width)
    phone(page)
    page.wait(lambda: 0 < page.script(width) < wide)
    assert page.overflow() <= 0


def test_the_numbers_are_there_as_a_table(page):
    page.click("#training summary")
    page.wait(lambda: len(page.all("#numbers tbody tr")) == 12)
    assert page.find("#numbers tbody tr").text.split()[:2] == ["1", "2"]
