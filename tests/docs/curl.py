"""As much of curl as the documentation uses, for machines without it."""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request


def main() -> int:
    """Make the request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-i", action="store_true")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    given = parser.parse_args()
    request = urllib.request.Request(given.url, given.data.encode() if given.data else None, method=given.method)
    for header in given.headers:
        name, _, value = header.partition(":")
        request.add_header(name, value.strip())
    try:
        response = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        if given.i:
            sys.stdout.write(f"HTTP/1.1 {response.status} {response.reason}\n{response.headers}")
            sys.stdout.flush()
        sys.stdout.buffer.write(response.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
