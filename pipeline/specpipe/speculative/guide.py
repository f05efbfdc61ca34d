"""What the text of an answer must be: a JSON schema, a regular expression, a grammar, a choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GuideType = Literal["json", "json_schema", "regex", "ebnf_grammar", "choice", "lark"]
"""The first four are those of NVIDIA's `guided_decoding_guide_type`."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A guide as a client sent it.

    text  the schema as JSON, the expression, the grammar (GBNF, or Lark as llguidance reads it), a
          JSON array of texts; "" for `json`, any JSON value
    """

    type: GuideType
    text: str = ""
