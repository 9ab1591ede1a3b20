"""The commands in the documentation."""

import re
import shlex


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """Job and overrides of each command of a text, in either form, without those that have placeholders (<...>)."""
    found = []
    for job, rest in re.findall(r"python -m (?:jobs\.|ssl_sec )(\w+)((?: [^\n`|#]*)?)", text.replace("\\\n", " ")):
        words = shlex.split(rest, comments=True)
        if job == "submit":
            job, *words = words or ["list"]
            if job in ("list", "status", "logs", "stop"):
                continue
        overrides = [word for word in words if re.match(r"[\w.]+=", word)]
        found.append((job, [re.sub("<.*>", "placeholder", word) for word in overrides]))
    return found
