"""Rollouts of one turn: who answers a prompt (the policy, an opponent, the data)."""
