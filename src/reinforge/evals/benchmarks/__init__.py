"""Presets of known benchmarks: their rows, what is asked, how answers are judged."""
