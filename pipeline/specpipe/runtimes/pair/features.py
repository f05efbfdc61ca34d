"""What a request may ask of a pair that not every runtime can do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from specpipe.errors import RequestError
from specpipe.speculative.request import Request

FEATURES: Mapping[str, Callable[[Request], bool]] = {
    "logit_bias_ids": lambda request: bool(request.sampling.logit_bias),
    "num_top_log_probs": lambda request: request.num_top_log_probs > 0,
    "return_prompt_log_probs": lambda request: request.return_prompt_log_probs,
    "guided_decoding_guide": lambda request: request.guide is not None,
    "prediction": lambda request: bool(request.prediction_token_ids),
    "cache_salt": lambda request: bool(request.cache_salt),
}
"""By the name of the ensemble's input, whether a request asks for it."""


def check_features(request: Request, honoured: Collection[str]) -> None:
    """Raises RequestError for an input of FEATURES that a pair does not honour."""
    for name, is_asked_for in FEATURES.items():
        if name not in honoured and is_asked_for(request):
            raise RequestError(f"{name} is not supported by this pair's runtime; leave it out")
