"""Export of a run's clusters to tools that people use: one module per tool, each with its ``FORMAT``.

content.py       what every export contains: one row per image, its embedding, its place on the map
places.py        the place of an image on the map, also for images that are not on the map of the report
parquet.py       rows as Parquet files
format.py        what a format is
writing.py       the formats by name; an export appears when it is complete
"""
