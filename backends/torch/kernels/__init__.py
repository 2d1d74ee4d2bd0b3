"""Attention over cache and tree: a plain reference, and faster equals beside it."""
