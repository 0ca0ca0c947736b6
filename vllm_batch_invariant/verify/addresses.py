"""Addresses of servers."""

from urllib.parse import urlsplit


def is_here(url: str) -> bool:
    """Whether an address is of this machine."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def address(base_url: str) -> str:
    """The address of a server for a report, without a password."""
    url = urlsplit(base_url)
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
