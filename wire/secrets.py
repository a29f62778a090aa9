"""Mask credentials of URLs in log lines and error messages. PURE."""

import re

_USER_INFO = re.compile(r"(?<=://)[^/\s]*@")


def masked(text: str) -> str:
    """Replace user and password of every URL in `text`: https://***@host/model."""
    return _USER_INFO.sub("***@", text)
