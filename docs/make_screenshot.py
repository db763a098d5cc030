"""Recreate docs/report.png, a screenshot of a run's report.

    secu demo
    python docs/make_screenshot.py runs/demo/report.html

Requires Chromium and its driver. The picture shows two sections of the page side by side: its top and its map.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

PICTURE = Path(__file__).parent / "report.png"
WINDOW = (1200, 1600)
SCALE = 0.625
COLORS = 128  # a palette keeps the file under 400 KB
SECTIONS = ("overview", "map")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def open_browser(profile: str) -> webdriver.Chrome:
    """Return a headless browser."""
    options = Options()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
    size = {"width": WINDOW[0], "height": WINDOW[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return browser


def main(report: str) -> None:
    """Take a screenshot of each section, and write the picture."""
    width = round(WINDOW[0] * SCALE)
    height = round(WINDOW[1] * SCALE)
    picture = Image.new("RGB", (len(SECTIONS) * width, height))
    with tempfile.TemporaryDirectory() as profile:
        browser = open_browser(profile)
        try:
            browser.get(Path(report).resolve().as_uri())
            for column, section in enumerate(SECTIONS):
                browser.execute_script("document.getElementById(arguments[0]).scrollIntoView()", section)
                browser.execute_async_script("setTimeout(arguments[0], 1500)")
                window = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
                picture.paste(window.resize((width, height), Image.Resampling.LANCZOS), (column * width, 0))
        finally:
            browser.quit()
    picture.quantize(COLORS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
