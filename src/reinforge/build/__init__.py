"""Floor 6: a config becomes objects. Names in a config are looked up here and nowhere below."""
