"""Engines that are servers of somebody else's with the trainer's weights."""
