"""Names of what the generated data holds. Imported in every environment."""

from __future__ import annotations

import numpy as np

CROP = 224
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)

ALL_COLUMNS = tuple(f"f{index}" for index in range(20))
COLUMNS = ALL_COLUMNS[:4]
FILTER_COLUMN = "f0"
THRESHOLD = 0.5

BLOCK_BYTES = 8 * 1000 * 1000
