"""Tests of a backend with real, tiny models; they run once per installed backend."""
