"""Credentials in addresses, taken out of what is written to logs and error messages. PURE."""

import re

_USER_INFO = re.compile(r"(?<=://)[^/\s]*@")


def masked(text: str) -> str:
    """`text` with the user and password of every URL in it replaced: https://***@host/model."""
    return _USER_INFO.sub("***@", text)
