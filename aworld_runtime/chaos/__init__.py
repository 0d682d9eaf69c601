"""Faults on real processes, drawn from a seed, and a checker of what was acknowledged. See docs/chaos.md."""
