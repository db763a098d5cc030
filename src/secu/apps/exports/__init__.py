"""Exports of a run's clusters to other tools: one module per tool, each with its ``FORMAT``.

content.py       what every export contains: one row per image, its embedding, its position on the map
places.py        positions on the map, also of images that are not on the map of the report
parquet.py       rows as Parquet files
format.py        what a format is
writing.py       the formats by name; an export appears only when it is complete
"""
