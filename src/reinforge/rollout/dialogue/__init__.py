"""Rollouts of many turns: episodes with an environment, and agent programs."""
