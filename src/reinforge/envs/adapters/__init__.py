"""Other people's environments, one small file per library.

Each imports its library when it makes an environment, and nothing here imports torch: any of them
also runs in another interpreter (`bridge.py`).
"""
