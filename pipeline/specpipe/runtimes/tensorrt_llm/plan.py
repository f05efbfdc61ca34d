"""The plan of a pair, with the settings of this runtime."""

from __future__ import annotations

from specpipe.config.engine import TensorRTLLMEngineConfig
from specpipe.runtimes.plan import PlanFor

PairPlan = PlanFor[TensorRTLLMEngineConfig]
