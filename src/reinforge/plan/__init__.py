"""Floor 7: what can be told about a run before it starts: errors, memory, seconds, layouts."""
