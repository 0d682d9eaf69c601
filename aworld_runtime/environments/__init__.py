"""Environments: where tasks come from, and who scores the answers."""
