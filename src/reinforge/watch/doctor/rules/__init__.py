"""The rules of the doctor: each a function of a run's history that gives one finding, or None.
Where there is no data for one it says nothing. `watch/doctor/table.py` has them in order.
"""
