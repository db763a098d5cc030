"""The report: a single HTML file to explore, correct and share the clusters of a run."""

from secu.results.report.build import ReportData
from secu.results.report.page import Report

__all__ = ["Report", "ReportData"]
