"""Environments: what answers the model's turns.

The contract is core/env.py; rollout/episodes.py plays them.
"""
