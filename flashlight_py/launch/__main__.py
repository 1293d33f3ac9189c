"""``python -m flashlight_py.launch``."""

import sys

from flashlight_py.launch.command_line import main

if __name__ == "__main__":
    sys.exit(main())
