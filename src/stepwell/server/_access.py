"""Who may call, and what: API keys, tokens, or nobody but this machine."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Collection, Iterable
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from stepwell.errors import InvalidInputError

from ._jwt import Claims, InvalidTokenError, JwtAuth
from ._problems import Problem

__all__ = ["ANONYMOUS", "Access", "Caller", "Capability", "caller_of", "is_loopback"]

ANONYMOUS: Final = "-"
"""Who calls where nothing is asked for; no key can have this name."""

Capability: TypeAlias = Literal["run", "read", "cancel", "metrics", "admin"]

_ALL: Final = frozenset[str]({"admin"})
_VARIABLE: Final = "STEPWELL_API_KEYS"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,47}")
_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_CHALLENGE: Final = 'Bearer realm="stepwell"'


def is_loopback(host: str) -> bool:
    """Whether a host name or address never leaves this machine."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever sent a request, and what they may do.

    Attributes:
        name: Keeps idempotency keys of callers apart, and is what the access log shows. Never a person's name.
        capabilities: What they may do; `admin` is everything.
        sessions: The sessions they may name; `None`: all of them.
        prefix: Sessions whose ids begin so, besides.
        client_id: As whom they speak on channels; `None`: as whom they say.
        expires: When what they presented is not valid any more, Unix time; `None`: never.
    """

    name: str = ANONYMOUS
    capabilities: frozenset[str] = _ALL
    sessions: frozenset[str] | None = None
    prefix: str | None = None
    client_id: str | None = None
    expires: float | None = None

    @property
    def limited(self) -> bool:
        """Whether there are sessions that they may not name."""
        return self.sessions is not None or self.prefix is not None

    def may(self, capability: Capability) -> bool:
        """Whether they may do that."""
        return capability in self.capabilities or "admin" in self.capabilities

    def covers(self, session: str) -> bool:
        """Whether they may name that session."""
        if not self.limited:
            return True
        return session in (self.sessions or ()) or (self.prefix is not None and session.startswith(self.prefix))

    def check(self, capability: Capability) -> None:
        """Refuse what they may not do.

        Raises:
            Problem: 403.
        """
        if not self.may(capability):
            raise Problem(
                403,
                "forbidden",
                f"This needs the capability {capability}, which the token does not give.",
                headers={"WWW-Authenticate": f'{_CHALLENGE}, error="insufficient_scope", scope="{capability}"'},
            )

    def check_unlimited(self) -> None:
        """Refuse what concerns all sessions to those that may not name all.

        Raises:
            Problem: 403.
        """
        if self.limited:
            raise Problem(403, "forbidden", "This concerns all sessions, and the token is limited to some.")


def caller_of(scope: Scope) -> Caller:
    """The caller that `Guard` let through."""
    return cast("Caller", scope["stepwell.caller"])


class Access:
    """The rule who may call.

    * `keys`: whoever presents an API key, which may do everything, or a token, which says what it may do.
    * `local`: without keys. Only callers on this machine, that came neither through a proxy nor from a page of another
      site.
    * `open`: everybody; something around this application decides.

    Args:
        keys: API keys, each `KEY` or `NAME:KEY`; `None` for those of the environment variable `STEPWELL_API_KEYS`
            (comma separated).
        jwt: What tokens are accepted; `None` for what the environment says (see `JwtAuth.from_env`).
        no_auth: `open`, whatever keys there are.
        local: With `no_auth`, `local` instead.
        origins: Origins whose pages may call although they are others; only `local` asks.

    Raises:
        InvalidInputError: A key cannot be one.
    """

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        *,
        jwt: JwtAuth | None = None,
        no_auth: bool = False,
        local: bool = False,
        origins: Collection[str] = (),
    ) -> None:
        if keys is None:
            keys = [key for key in os.environ.get(_VARIABLE, "").split(",") if key.strip()]
        # Digests: of equal length whatever the key, so that comparing them says nothing.
        self._digests: list[tuple[bytes, Caller]] = [_parse(key) for key in keys] if not no_auth else []
        self._jwt = None if no_auth else jwt or JwtAuth.from_env()
        self._origins = origins
        self.mode: Literal["keys", "local", "open"] = (
            "keys" if self._digests or self._jwt else "open" if no_auth and not local else "local"
        )

    def check(self, scope: Scope, headers: Headers) -> Caller:
        """The caller.

        Raises:
            Problem: 401, 403 or 421.
        """
        if self.mode == "open":
            return Caller()
        if self.mode == "keys":
            return self._holder(headers)
        _check_local(scope, headers, self._origins)
        return Caller()

    def _holder(self, headers: Headers) -> Caller:
        kind, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if kind.lower() == "bearer" else ""
        key = bearer or headers.get("x-api-key", "").strip()
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        found: Caller | None = None
        for known, caller in self._digests:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is not None:
            return found
        if self._jwt is not None and bearer.count(".") == 2:
            try:
                return _bearer(self._jwt.verify(bearer))
            except InvalidTokenError as error:
                raise _unauthenticated(f"The token is not valid: {error}.", ', error="invalid_token"') from None
        wanted = "API key" if self._jwt is None else "token or API key" if self._digests else "token"
        raise _unauthenticated(f"Send a valid {wanted} in the header Authorization: Bearer ...{self._or_header()}")

    def _or_header(self) -> str:
        return ", or an API key in X-API-Key." if self._digests else "."


def _bearer(claims: Claims) -> Caller:
    # A subject may be a person, and the name goes into the log.
    digest = hashlib.sha256(f"{claims.issuer}\0{claims.subject}".encode()).hexdigest()[:24]
    return Caller(
        name=f"jwt:{digest}",
        capabilities=claims.capabilities,
        sessions=claims.sessions,
        prefix=claims.prefix,
        client_id=claims.subject,
        expires=claims.expires,
    )


def _unauthenticated(detail: str, more: str = "") -> Problem:
    return Problem(401, "unauthenticated", detail, headers={"WWW-Authenticate": _CHALLENGE + more})


def _parse(given: str) -> tuple[bytes, Caller]:
    name, separator, key = given.strip().rpartition(":")
    name = name if separator else "default"
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidInputError("An API key is printable ASCII without spaces, commas and colons.", "/api_keys")
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            "The name of an API key has 1 to 48 letters, digits, _, . and -, and does not begin with . or -.",
            "/api_keys",
        )
    return hashlib.sha256(key.encode()).digest(), Caller(name=name)


def _check_local(scope: Scope, headers: Headers, origins: Collection[str]) -> None:
    peer: Any = scope.get("client")
    if peer is None or not is_loopback(peer[0]) or any(name in headers for name in _FORWARDED):
        raise _unauthenticated(
            "This server has no API keys and answers callers on its own machine only: give it keys "
            "(STEPWELL_API_KEYS) and send one."
        )
    host = headers.get("host", "")
    # A page of another site may come in by a name that it lets point to this machine, or post without asking.
    if not is_loopback(_without_port(host)):
        raise Problem(
            421, "misdirected_request", "Without API keys this server answers to localhost only, not to other names."
        )
    origin = headers.get("origin")
    if origin is None or scope["method"] in _SAFE or origin in origins or "*" in origins:
        return
    if origin.partition("://")[2] != host:
        raise Problem(403, "cross_origin", "Without API keys pages of other origins may not call this server.")


def _without_port(host: str) -> str:
    return host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
