"""One file for each kind of drafter that can be trained: its settings, its loss, and how it is written to disk."""
