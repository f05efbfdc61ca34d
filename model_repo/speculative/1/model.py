"""Runs the draft and the target: one thread steps all requests, each answers as its chunks come."""

import logging
import uuid
from functools import partial

import triton_python_backend_utils as pb_utils

from specpipe.errors import FAULT, RequestError, ServerError, to_sentence
from specpipe.text import Tokenizer
from specpipe.triton import repository, serving
from specpipe.triton.cancel_ids import CancelIds
from specpipe.triton.loop import PairLoop
from specpipe.triton.metrics import Counters
from specpipe.triton.secret import Signer

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LOGGER = logging.getLogger(__name__)


class TritonPythonModel:
    def initialize(self, args):
        limits = repository.read_limits(args)
        tokenizer = Tokenizer.load(repository.tokenizer_folder(args), limits)
        pair_file = repository.read_pair_file(args)
        self._max_seq_len = pair_file.options.max_seq_len
        self._signer = Signer.from_environment()
        self._cancel_ids = CancelIds()
        self._counters = Counters(pb_utils.MetricFamily, args["model_name"])
        self._loop = PairLoop(
            repository.load_pair(args, pair_file, tokenizer.detokenizer, tokenizer.guides),
            on_report=self._counters.report,
            stream_interval_s=pair_file.options.stream_interval_s,
            on_gathered=self._counters.count_gathered,
        )

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = {t.name(): t.as_numpy() for t in request.inputs()}
                self._take(request.request_id(), tensors, sender)
            except RequestError as exc:
                self._counters.begin_request()  # and out again, as refused
                self._refuse(sender, exc)
            except Exception:
                LOGGER.exception("a request failed")
                _send_error(sender, FAULT, code=pb_utils.TritonError.INTERNAL)

    def _take(self, request_id, tensors, sender):
        if serving.CANCEL.name in tensors:
            cancel_id = serving.read_cancel(tensors, self._signer)
            self._loop.cancel(self._cancel_ids.stream_id(cancel_id))
            sender.send(flags=FINAL)
            return
        stream_id = uuid.uuid4().hex
        generation = serving.Generation.from_tensors(
            tensors, request_id=stream_id, signer=self._signer, max_seq_len=self._max_seq_len
        )
        self._counters.begin_request()
        self._cancel_ids.open(request_id, stream_id)
        close = partial(self._cancel_ids.close, request_id, stream_id)
        self._loop.submit(
            generation.request,
            on_chunk=partial(self._on_chunk, sender, serving.Answer(generation, stream_id), close),
            on_refusal=partial(self._refuse, sender, close=close),
            is_stream=generation.stream,
        )

    def finalize(self):
        self._loop.close()
        self._counters.close()

    def _refuse(self, sender, error, close=None):
        if close is not None:
            close()
        self._counters.end_request()
        _send_error(sender, error, code=pb_utils.TritonError.INVALID_ARG)

    def _on_chunk(self, sender, answer, close, chunk):
        is_last = chunk.finish_reason is not None
        if is_last:
            close()
            self._counters.end_request(chunk)
        try:
            arrays = answer.add(chunk)
        except ServerError as exc:
            _send_error(sender, exc, code=pb_utils.TritonError.INTERNAL)
            return
        if arrays is not None:
            # Postprocessing looks for those who ask the ensemble, of whom nothing is heard here.
            if serving.STREAM_ID.name in arrays and sender.is_cancelled():
                self._loop.cancel(chunk.request_id)
            tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
            sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if is_last else 0)
            self._counters.count_response()


def _send_error(sender, error, *, code):
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(to_sentence(error), code))
    sender.send(response, flags=FINAL)
