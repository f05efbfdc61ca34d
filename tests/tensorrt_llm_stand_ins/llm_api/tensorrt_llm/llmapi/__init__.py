"""The names of tensorrt_llm.llmapi that specpipe uses, and what the release's line is like."""

from .llm_args import HERE as HERE
from .llm_args import VERSION as VERSION
from .llm_args import DraftTargetDecodingConfig as DraftTargetDecodingConfig
from .llm_args import KvCacheConfig as KvCacheConfig

if HERE.has_parallel:
    from .llm_args import PARDDecodingConfig as PARDDecodingConfig
