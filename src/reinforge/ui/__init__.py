"""The web app: a folder of runs in a browser.

It reads run directories, and starts runs as processes of their own; training never depends on it.
"""
