"""A trained run → one HTML file a person can look at, correct and pass on.

data.py         what a report is made from
build.py        numbers → the content of the page, as plain values
layout.py       embeddings → points on a map
thumbnails.py   images → sprite sheets that keep to a budget
page.py         content + template + style + scripts → one file without a single request
template.html.j2, style.css, *.js   what the browser gets
"""

from secu.report.data import ReportData
from secu.report.page import write_report

__all__ = ["ReportData", "write_report"]
