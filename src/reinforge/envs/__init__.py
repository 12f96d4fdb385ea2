"""Environments: what answers the model's turns.

The contract is core/env.py; rollout/dialogue/ plays them.
"""
