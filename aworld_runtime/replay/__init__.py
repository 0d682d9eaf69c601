"""Replay: recorded handlers run again over their log."""
