"""The oracle is installed as the peers of benchmarks/ are, by what stands there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
