"""Floor 1: what a run writes about itself (`recorder`, `sinks`, `timing`), shows while it goes
(`view`) and afterwards (`runs`, `report`).

Nothing here imports torch: looking at a run is quick.
"""
