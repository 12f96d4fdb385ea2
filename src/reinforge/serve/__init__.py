"""Floor 5: a model behind the OpenAI API: requests, answers, connections. Knows no config file."""
