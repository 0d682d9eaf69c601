"""Stores: SQLite in a file, MongoDB over the wire."""

from aworld_runtime.store.base import EpisodeRecord, RolloutRow, RunRecord, Store
from aworld_runtime.store.open import open_store

__all__ = ["EpisodeRecord", "RolloutRow", "RunRecord", "Store", "open_store"]
