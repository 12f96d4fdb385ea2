"""Floor 8: many runs of one configuration, each with other values, in search of the best."""
