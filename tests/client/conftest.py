"""Lets the tests of the client import the door and the scripted front that it is tested against."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "front_socket"))
