"""Floor 1: how weights reach an engine that runs elsewhere.

A channel publishes, the engine's plug-in stages and commits, a probe proves it.
"""
