"""Nodes: what turns an event into events, the owner that runs an episode of them, workers and the archiver."""
