"""Types of NumPy arrays that many modules share.

`Bytes` is (n,) uint8. `Column` is (n,) of any dtype: one field of many chunks or blobs, of which several form a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Column = npt.NDArray[Any]
