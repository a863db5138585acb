"""JSON web tokens: which are accepted, and what their claims mean."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from stepwell.errors import InvalidInputError

__all__ = ["Claims", "InvalidTokenError", "JwtAuth"]

_SECRET: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
"""Algorithms with a shared secret, and how many bytes it has at least."""

_LEEWAY: Final = 10.0
"""Seconds by which the clock of whoever issues tokens may differ."""

_SUBJECT_LENGTH: Final = 255
_LIMITS: Final = ("sessions", "session_prefix")


class InvalidTokenError(Exception):
    """A token is not accepted; says why, without anything of it."""


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What a token says.

    Attributes:
        subject: `sub`: who presents it.
        issuer: `iss`, `""` where it says none.
        capabilities: `capabilities`, or the words of `scope`: names, in an array or separated by spaces.
        sessions: `sessions`: one id or an array of ids; `None`: not limited by it.
        prefix: `session_prefix`; `None`: not limited by it.
        expires: `exp`, Unix time.
    """

    subject: str
    issuer: str
    capabilities: frozenset[str]
    sessions: frozenset[str] | None
    prefix: str | None
    expires: float


class JwtAuth:
    """Which JSON web tokens a server accepts: signed with this key, by this one algorithm, for this audience.

    A token has the claims `sub`, `exp`, `aud` and `capabilities`; `iss` where an issuer is given; `nbf` and `iat` are
    looked at where they are there. `sessions` and `session_prefix` limit it to sessions. Documented in the guide.

    Args:
        secret: Shared with whoever issues the tokens, at least 32 bytes (`HS384`: 48, `HS512`: 64); or
        key_file: a file with the public key (PEM) of whoever issues them, or with such a secret.
        algorithm: The one algorithm; by default `HS256` with a secret, and what fits a public key: `RS256`, `ES256`,
            `ES384`, `ES512` or `EdDSA`.
        audience: What `aud` has to name.
        issuer: What `iss` has to be; `None`: whoever has the key.

    Raises:
        InvalidInputError: The key is missing, too short or no key, or the algorithm does not fit it.
        ImportError: The extra `server` is not installed whole.
    """

    def __init__(
        self,
        secret: str | None = None,
        *,
        key_file: str | Path | None = None,
        algorithm: str | None = None,
        audience: str = "stepwell",
        issuer: str | None = None,
    ) -> None:
        try:
            import jwt
        except ImportError as error:
            raise ImportError('Tokens need the extra "server": pip install "stepwell[server]".') from error
        if (secret is None) == (key_file is None):
            raise InvalidInputError("Tokens are checked with a secret or with a key file: give one of them.", "/jwt")
        self._jwt: Any = jwt
        self._audience = audience
        self._issuer = issuer
        given = secret if secret is not None else _read(Path(cast("str", key_file)))
        public = "-----BEGIN" in given
        fitting = _algorithms_of(given) if public else tuple(_SECRET)
        self._key: Any = _public_key(given) if public else given
        self._algorithm = algorithm or fitting[0]
        if self._algorithm not in fitting:
            raise InvalidInputError(
                f"The algorithm {self._algorithm[:16]!r} does not fit the key: use {' or '.join(fitting)}.", "/jwt"
            )
        if not public and len(given.encode()) < (least := _SECRET[self._algorithm]):
            raise InvalidInputError(
                f"A secret for {self._algorithm} has at least {least} bytes: openssl rand -base64 {least} makes one.",
                "/jwt",
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> JwtAuth | None:
        """What the environment says; `None`: nothing of tokens.

        `STEPWELL_JWT_SECRET` or `STEPWELL_JWT_KEY_FILE`, and `STEPWELL_JWT_ALGORITHM`, `STEPWELL_JWT_AUDIENCE`,
        `STEPWELL_JWT_ISSUER`.

        Raises:
            InvalidInputError: See the class.
        """
        env = os.environ if environ is None else environ
        secret, key_file = env.get("STEPWELL_JWT_SECRET") or None, env.get("STEPWELL_JWT_KEY_FILE") or None
        if secret is None and key_file is None:
            return None
        return cls(
            secret,
            key_file=key_file,
            algorithm=env.get("STEPWELL_JWT_ALGORITHM") or None,
            audience=env.get("STEPWELL_JWT_AUDIENCE") or "stepwell",
            issuer=env.get("STEPWELL_JWT_ISSUER") or None,
        )

    def verify(self, token: str) -> Claims:
        """Check a token.

        Raises:
            InvalidTokenError: It is not accepted.
        """
        try:
            claims: dict[str, Any] = self._jwt.decode(
                token,
                self._key,
                algorithms=[self._algorithm],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY,
                options={"require": ["exp", "aud", "sub", *(["iss"] if self._issuer else [])]},
            )
        except self._jwt.PyJWTError as error:
            raise InvalidTokenError(_why(type(error).__name__)) from None
        except (ValueError, TypeError, OverflowError):  # claims of types that the library does not expect
            raise InvalidTokenError("a claim is malformed") from None
        return _claims(claims)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"The key file {path} cannot be read: {type(error).__name__}.", "/jwt") from None


def _public_key(pem: str) -> Any:
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise ImportError("Public keys for tokens need cryptography: pip install 'pyjwt[crypto]'.") from error
    try:
        return load_pem_public_key(pem.encode())
    except ValueError:
        raise InvalidInputError("The key file holds no public key in PEM, nor a secret.", "/jwt") from None


def _algorithms_of(pem: str) -> tuple[str, ...]:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    key = _public_key(pem)
    if isinstance(key, RSAPublicKey) and key.key_size >= 2048:
        return ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
    if isinstance(key, EllipticCurvePublicKey):
        named = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}.get(key.curve.name)
        if named is not None:
            return (named,)
    if isinstance(key, Ed25519PublicKey):
        return ("EdDSA",)
    raise InvalidInputError(
        "Tokens are checked with RSA keys of at least 2048 bits, keys on P-256, P-384 or P-521, or Ed25519.", "/jwt"
    )


def _why(name: str) -> str:
    return {
        "ExpiredSignatureError": "it has expired",
        "ImmatureSignatureError": "it is not valid yet",
        "InvalidAudienceError": "it is for another audience",
        "InvalidIssuerError": "another issuer made it",
        "InvalidSignatureError": "its signature is wrong",
        "InvalidAlgorithmError": "its algorithm is not the one that is agreed on",
        "MissingRequiredClaimError": "a claim is missing (sub, exp, aud, or iss)",
    }.get(name, "it is malformed")


def _claims(claims: Mapping[str, Any]) -> Claims:
    subject = claims["sub"]
    if not isinstance(subject, str) or not 0 < len(subject) <= _SUBJECT_LENGTH:
        raise InvalidTokenError(f"sub is text of 1 to {_SUBJECT_LENGTH} characters")
    prefix: Any = claims.get("session_prefix")
    if "session_prefix" in claims and (not isinstance(prefix, str) or not prefix):
        raise InvalidTokenError("session_prefix is text that is not empty")
    named = claims.get("capabilities", claims.get("scope", ""))
    sessions = claims.get("sessions")
    if isinstance(sessions, str):
        sessions = [sessions]
    return Claims(
        subject=subject,
        issuer=str(claims.get("iss", "")),
        capabilities=_texts(named.split() if isinstance(named, str) else named, "capabilities"),
        sessions=_texts(sessions, "sessions") if "sessions" in claims else None,
        prefix=prefix,
        expires=float(claims["exp"]),
    )


def _texts(value: Any, claim: str) -> frozenset[str]:
    # A claim that is there and says nothing readable must never mean "not limited".
    if not isinstance(value, list) or not all(isinstance(one, str) for one in cast("list[Any]", value)):
        raise InvalidTokenError(f"{claim} is an array of texts")
    return frozenset(cast("list[str]", value))
