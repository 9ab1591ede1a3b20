"""Masks secrets in parameters, metadata, artifacts and logs."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"


def _userinfo(ends: str) -> re.Pattern[str]:
    """The user name and password of a URI.

    The password of a database may have a slash; in other URIs the path begins there. In Azure's URLs what stands before
    the @ is the name of the container, unless it has a colon. A password may have an @, too.

    Args:
        ends: the characters that end a URI, for a set of a regular expression.
    """
    return re.compile(
        rf"((?:postgres(?:ql)?|mysql|mariadb|mssql|oracle)(?:\+\w+)?://(?=[^@{ends}]+@)"
        rf"|(?:(?<!\babfs)(?<!\babfss)(?<!\bwasb)(?<!\bwasbs)://|://(?=[^/@{ends}]*:))(?=[^/@{ends}]+@))"
        rf"[^@{ends}]+@(?:[^/@{ends}]*@)*"
    )


_IN_TEXT, _IN_ADDRESS = _userinfo(r"\s'\""), _userinfo(r"\n")
# Where it is known where a URI ends, its password may have spaces and quotes: a text that is one, alone or after a key,
# and one in quotes.
_ADDRESS = re.compile(r"(?:[\w.+]+=)?[\w+.-]+://.*")
_QUOTED_ADDRESS = re.compile(r"(?P<quote>['\"])(?:[\w.+]+=)?[\w+.-]+://(?:\\.|(?!(?P=quote))[^\n\\])*(?P=quote)")
_SECRET_KEY = re.compile(
    r"token|passw(or)?d|passphrase|secret|credential|api_?key|access_?key|private_?key", re.IGNORECASE
)
# The part of a URL's query that lets anyone who has it read the file; CloudFront signs by a policy and a key pair.
_SIGNATURE = re.compile(
    r"([?&](?:sig|signature|x-(?:amz|goog)-signature|policy|key-pair-id|key|auth|authorization|jwt|"
    rf"[\w.-]*(?:{_SECRET_KEY.pattern})[\w.-]*)=)[^&\s'\"]+",
    re.IGNORECASE,
)
# In code and settings: the name of a secret, then = or :, then a string in quotes, or a bare word that is not code.
_ASSIGNED = re.compile(
    rf"(?P<start>(?:{_SECRET_KEY.pattern})\w*['\"]?\s*[:=]\s*)"
    r"(?:(?P<quote>['\"])[^'\"\n]+(?P=quote)|(?=[^\s()\[\]{},;]*\d)[\w./+=~-]{8,}(?![\w([.]))",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """Hides the user names and passwords of URIs in a text, and the signatures of signed URLs."""

    def hidden(found: re.Match[str]) -> str:
        return _IN_ADDRESS.sub(shown, found[0])

    shown = rf"\1{HIDDEN}@"
    text = hidden(found) if (found := _ADDRESS.fullmatch(text)) else _QUOTED_ADDRESS.sub(hidden, text)
    return _SIGNATURE.sub(rf"\1{HIDDEN}", _IN_TEXT.sub(shown, text))


def masked_command(arguments: Sequence[str]) -> str:
    """Joins a command line for a shell, with the values of keys like `token` and the userinfo of URIs hidden."""
    shown: list[str] = []
    for argument in arguments:
        key, given, _ = argument.partition("=")
        shown.append(f"{key}={HIDDEN}" if given and _SECRET_KEY.search(key) else masked(argument))
    return shlex.join(shown)


def masked_code(text: str) -> str:
    """Hides the userinfo of URIs, and values assigned to names like `token`, in source code or a patch."""

    def hidden(found: re.Match[str]) -> str:
        quote = found["quote"] or ""
        return f"{found['start']}{quote}{HIDDEN}{quote}"

    return _ASSIGNED.sub(hidden, masked(text))


def masked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hides the values of keys like `token` or `password`, and the userinfo of URIs, in nested values."""
    return {
        key: HIDDEN if _SECRET_KEY.search(key) and value is not None else _masked(value)
        for key, value in values.items()
    }


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return masked_values(value)
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    return masked(value) if isinstance(value, str) else value
