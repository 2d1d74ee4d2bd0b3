"""Tests of the command line, with a scripted engine."""
