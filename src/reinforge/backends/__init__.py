"""Floor 2: backends.

Each implements `reinforge.core.backend.Backend`; all share the one micro-batch pass.
"""
