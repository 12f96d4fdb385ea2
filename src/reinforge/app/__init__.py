"""Floor 6: the command line, the Python API, and the checks before a run.

Config names become objects only here.
"""
