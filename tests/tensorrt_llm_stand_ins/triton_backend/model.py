"""A Triton backend named `tensorrtllm` in Python, for machines without TensorRT-LLM.

Triton serves every model of `backend: "tensorrtllm"` with it once this folder lies among its
backends (Triton calls that a Python-based backend). The engine's folder, which `gpt_model_path`
names, holds beside its `config.json` an engine of the torch runtime in `torch`; see engines.py.

Metrics, with the model's name as label: `stand_in_running`, `stand_in_verified_total` (requests
with draft tokens), `stand_in_stopped_total` (those that ran when they were cancelled).
"""

import json
import queue
import sys
import threading
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.tensorrt_llm_stand_ins.triton_backend.stand_in import (  # noqa: E402
    EngineLimits,
    Refused,
    is_stop,
    read,
)
from tests.tensorrt_llm_stand_ins.triton_backend.torch_scorer import TorchScorer  # noqa: E402

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = Path(config["parameters"]["gpt_model_path"]["string_value"])
        self._is_decoupled = config["model_transaction_policy"]["decoupled"]
        self._limits = EngineLimits.of(
            json.loads((folder / "config.json").read_bytes()), is_decoupled=self._is_decoupled
        )
        self._model = TorchScorer(folder / "torch")
        family = pb_utils.MetricFamily
        self._families = [
            family(name=name, description="the stand-in's", kind=kind)
            for name, kind in (
                ("stand_in_running", family.GAUGE),
                ("stand_in_verified_total", family.COUNTER),
                ("stand_in_stopped_total", family.COUNTER),
            )
        ]
        self._running, self._verified, self._stopped = (
            made.Metric(labels={"model": config["name"]}) for made in self._families
        )
        self._inbox = queue.SimpleQueue()
        self._generations = {}
        self._is_closed = False
        if self._is_decoupled:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def execute(self, requests):
        if not self._is_decoupled:
            return [self._answer(request) for request in requests]
        for request in requests:
            tensors = _tensors(request)
            self._inbox.put((request.request_id(), tensors, request.get_response_sender()))
        return None

    def finalize(self):
        self._is_closed = True
        self._inbox.put(None)
        if self._is_decoupled:
            self._thread.join()

    def _answer(self, request):
        """The whole answer to a request; it is too short to be stopped."""
        tensors = _tensors(request)
        if is_stop(tensors):
            return pb_utils.InferenceResponse([])
        try:
            generation = self._begin(tensors)
            while not generation.is_done:
                generation.step(self._model)
        except Refused as exc:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(exc)))
        return _response(generation)

    def _begin(self, tensors):
        generation = read(tensors, self._limits, self._model.vocab_size)
        if generation.draft_ids:
            self._verified.increment(1)
        return generation

    def _run(self):
        """Steps all generations in turn; new ones join between two steps."""
        while not self._is_closed:
            while not self._generations or not self._inbox.empty():
                news = self._inbox.get()
                if news is None:
                    return
                self._take(*news)
            for request_id, (generation, sender) in list(self._generations.items()):
                self._step(request_id, generation, sender)

    def _take(self, request_id, tensors, sender):
        if is_stop(tensors):
            if request_id in self._generations:
                self._generations[request_id][0].is_done = True
                self._stopped.increment(1)
            sender.send(flags=FINAL)
            return
        try:
            if request_id in self._generations:
                raise Refused(f"request {request_id} runs already")
            self._generations[request_id] = (self._begin(tensors), sender)
            self._running.set(len(self._generations))
        except Refused as exc:
            _send_error(sender, exc)

    def _step(self, request_id, generation, sender):
        try:
            if not generation.is_done:
                generation.step(self._model)
        except Exception as exc:  # whatever it is, nobody may wait for an answer
            del self._generations[request_id]
            _send_error(sender, exc)
        else:
            if generation.is_done:
                del self._generations[request_id]
            if generation.is_done or generation.is_streaming:
                sender.send(_response(generation), flags=FINAL if generation.is_done else 0)
        self._running.set(len(self._generations))


def _tensors(request):
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _response(generation):
    arrays = generation.response()
    return pb_utils.InferenceResponse([pb_utils.Tensor(n, a) for n, a in arrays.items()])


def _send_error(sender, error):
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)
