"""More than one machine: Ray, and what submits to schedulers. Nothing of Ray is imported outside of
this package.
"""
