"""Floor 10: the command line. Commands parse and print; the work is below."""
