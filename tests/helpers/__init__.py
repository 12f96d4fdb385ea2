"""What tests share: `from helpers.toys import make_model`.

Imports nothing itself: some of these modules are imported by processes that must stay small.
"""
