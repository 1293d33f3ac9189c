"""``python -m flashlight_py.launch``."""

from __future__ import annotations

import sys

from flashlight_py.launch.command_line import main

if __name__ == "__main__":
    sys.exit(main())
