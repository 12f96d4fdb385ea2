"""From a file of another library to a configuration of ours: `reinforge migrate`.

`readers/` take keys and values out of YAML, shell commands and Python scripts, without running
any; `tables/` say what every key is here, one file a library; `libraries/` put together what
several keys make; `translate.py` does it in order.
"""
