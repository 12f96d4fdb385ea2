"""Losses as a backend calls them, and the functions that they are made of."""
