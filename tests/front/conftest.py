"""The HTTP door over fake neighbours, ready to serve; see echo_door."""

import pytest
from front.echo_door import Door


@pytest.fixture
def door() -> Door:
    return Door().start()
