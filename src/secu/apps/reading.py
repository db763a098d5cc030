"""The rule for reading images: decoded once into a cache, or in every epoch if the cache would fill the disk."""

from pathlib import Path
from typing import Any

from secu.apps.feature_plan import Change, Facts, asked
from secu.data import Source, default_cache
from secu.data.cache import free_space

CACHE_SHARE = 0.5  # largest cache as a share of the free disk space


def room_for(source: Source, cache: Path | None) -> int | None:
    """Return the disk space in bytes that is free for decoded images; None if they are not cached in any case."""
    if source.on_demand or not source.random_order or not source.cacheable:
        return None
    return free_space(source, cache or default_cache())


def reading(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    """Choose whether images are decoded in every epoch."""
    data = settings["data"]
    wanted = asked(settings, "data", "on_demand")
    size = facts.images * data["channels"] * data["image_size"] ** 2
    if wanted is not None:
        return {}, f"decoding: {'in every epoch' if wanted else 'once'}, as requested"
    if facts.room is None:
        return {}, "decoding: chosen by the source"
    free = f"{_readable(facts.room)} are free"
    if size <= CACHE_SHARE * facts.room:
        return {}, f"decoding: once, into a cache of {_readable(size)}; {free}"
    why = f"a cache of decoded images would take {_readable(size)}, and {free}; every epoch decodes them again"
    return {"data": {"on_demand": True}}, f"data.on_demand=true: {why}"


def _readable(size: int) -> str:
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if size >= pair[0]), (1e3, "kB"))
    return f"{size / unit:,.1f} {name}"
