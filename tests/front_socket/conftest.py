"""Lets the tests of the socket door import `door_fakes` from beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
