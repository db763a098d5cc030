"""Results of a trained model: tables, pictures and the report.

found.py      the results of a finished run: cluster and confidence of every image, outliers, scores
results.py    compute the results and write all files
tables.py     assignments as CSV, Parquet or JSON lines
reading.py    the tables of a run, read back
cells.py      CSV cells that spreadsheets must not evaluate
health.py     warnings in plain language
duplicates.py images that are the same picture; hashes.py compares pictures
pictures.py   images for display, each decoded at most once
exemplars.py  one sheet with the most typical images of every cluster
report/       an HTML page to explore, name and merge clusters, and to download the result
edits.py      the user's edits in the report, read back by ``secu sort``
"""
