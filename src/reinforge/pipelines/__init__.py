"""Floor 8: several stages, one after the other, each made again or found finished."""
