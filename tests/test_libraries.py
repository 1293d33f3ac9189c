"""Loaded libraries are listed during imports by other threads and after their files are deleted."""

import _ctypes
import shutil
import subprocess
import sys
from pathlib import Path

# `PyDLL` holds the GIL during dlopen, like imports of extension modules. All files are deleted
# before the first request.
OPENS_AND_LISTS = """
import ctypes, os, sys, threading
from flashlight_py import libraries

list_often = lambda: [[*libraries.loaded_libraries("blas")] for _ in range(500)]
listing = threading.Thread(target=list_often)
listing.start()
for path in sys.argv[1:]:
    assert ctypes.PyDLL(None).dlopen(path.encode(), 2)
    os.remove(path)
listing.join()
assert len([*libraries.loaded_libraries("copy_of_a_library")]) == len(sys.argv) - 1
"""


def test_loaded_libraries_works_while_another_thread_loads(tmp_path: Path) -> None:
    files = [shutil.copy(_ctypes.__file__, tmp_path / f"copy_of_a_library{n}") for n in range(100)]
    subprocess.run([sys.executable, "-c", OPENS_AND_LISTS, *files], timeout=60, check=True)
