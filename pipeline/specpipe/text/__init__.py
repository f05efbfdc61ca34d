"""Text and token ids: tokenizers, detokenizers, chat templates.

The models in a repository import this package, so that its names stay where they are.
"""

from specpipe.text.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
