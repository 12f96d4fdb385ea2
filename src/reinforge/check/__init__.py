"""Floor 8: `reinforge check`: proves that parts of a run work before it costs anything."""
