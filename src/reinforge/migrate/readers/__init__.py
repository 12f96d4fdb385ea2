"""What gets keys and values out of files: YAML, shell commands, Python scripts.

Nothing is run.
"""
