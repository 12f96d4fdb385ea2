"""Where there is no GPU, Triton's interpreter runs its kernels; it must be asked for before the
first kernel is imported.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
