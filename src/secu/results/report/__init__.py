"""The report: a single HTML file to explore, correct and share the clusters of a run.

data.py         the input of a report
build.py        the content of the page as plain values; cards.py, duplicates.py and truth.py compute parts of it
tree.py         the tree of clusters, and the parts into which it splits them
layout.py       embeddings → points on a map; center_map.py places clusters
limits.py       bounds on the text of the page
thumbnails.py   pictures → sprite sheets within a byte budget
page.py         content + template + style + scripts → one self-contained file
template.html.j2, *.css, *.js   the source of the page
"""

from secu.results.report.data import ReportData
from secu.results.report.page import Report

__all__ = ["Report", "ReportData"]
