"""Masks passwords in the URLs of a text.

Errors, logs and commands show addresses that a user wrote, so all of them go through here.
"""

from __future__ import annotations

import re

__all__ = ["MASK", "mask_login", "mask_passwords"]

MASK = "********"

_USER = re.compile(r"(?<=://)[^/\s?#'\"]+(?=@)")
"""User and password before the host of a URL. A user alone can be a token, as in NATS."""
_NAMES = r"passw|pwd|secret|token|credential|signature|key|\bsig\b"
_QUERY = re.compile(rf"(?<=[?&])([^=&#\s'\"]*(?:{_NAMES})[^=&#\s'\"]*=)[^&#\s'\"]+", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://).*(?=@)", re.DOTALL)
_FROM_SECRET = re.compile(rf"(?:^|(?<=&))([^=&]*(?:{_NAMES})[^=&]*=).+", re.DOTALL | re.IGNORECASE)


def mask_login(url: str) -> str:
    """Return a setting that may be a URL with all that may be a login in it masked.

    Unlike in a sentence, all before the last "@" and all of the query belongs to the URL, also
    where a password has characters that ought to be encoded.
    """
    if "://" not in url:
        return url
    place, mark, query = _LOGIN.sub(MASK, url).partition("?")
    return place + mark + _FROM_SECRET.sub(rf"\g<1>{MASK}", query)


def mask_passwords(text: str) -> str:
    """Return ``text`` with the logins and keys of all URLs in it masked."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<1>{MASK}", _USER.sub(MASK, text))
