"""Stores: SQLite in a file, MongoDB over the wire."""

from aworld_runtime.store.base import BusRecord, EpisodeRecord, RolloutRow, RunRecord, Store
from aworld_runtime.store.open import open_store

__all__ = ["BusRecord", "EpisodeRecord", "RolloutRow", "RunRecord", "Store", "open_store"]
