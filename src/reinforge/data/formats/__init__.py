"""Rows in the shapes that data sets have, read as they are.

`table.py` says which formats there are; `recognise.py` finds the one of a row and reads it; the
other files say what their columns become. No torch here.
"""

from reinforge.data.formats.recognise import ReadAs as ReadAs
from reinforge.data.formats.recognise import nearest as nearest
from reinforge.data.formats.recognise import read_row as read_row
from reinforge.data.formats.table import FORMATS as FORMATS
from reinforge.data.formats.table import Format as Format
