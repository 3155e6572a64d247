"""Masks passwords in the URLs of a text.

Errors, logs and commands show addresses that a user wrote, so all of them go through here.
"""

from __future__ import annotations

import re

__all__ = ["MASK", "mask_passwords"]

MASK = "********"

_USER = re.compile(r"(?<=://)[^/\s?#'\"]+(?=@)")
"""User and password before the host of a URL. A user alone can be a token, as in NATS."""
_QUERY = re.compile(
    r"(?<=[?&])([^=&#\s'\"]*(?:passw|secret|token|credential|signature|key)[^=&#\s'\"]*=)"
    r"[^&#\s'\"]+",
    re.IGNORECASE,
)


def mask_passwords(text: str) -> str:
    """Return ``text`` with the logins and keys of all URLs in it masked."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<1>{MASK}", _USER.sub(MASK, text))
