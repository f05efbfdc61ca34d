"""Ids of tool calls, which the door makes: models write none, or none that is unique."""

from __future__ import annotations

import secrets
import string

_ALPHANUMERIC = string.ascii_letters + string.digits

NUM_MISTRAL = 9
"""Letters and digits that Mistral's chat templates want."""


def openai_id() -> str:
    """Returns a random id as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def mistral_id() -> str:
    """Returns a random id that Mistral's chat templates take."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(NUM_MISTRAL))
