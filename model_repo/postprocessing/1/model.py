"""Hands one chunk's text to the client, and a client's cancellation back to `speculative`.

Triton tells a cancellation to this step of the ensemble alone: `speculative`, which is running
since before it, never hears of it by itself.
"""

import json

import triton_python_backend_utils as pb_utils

from specpipe.triton import serving
from specpipe.triton.answering import answer_each
from specpipe.triton.model_config import CANCELS
from specpipe.triton.secret import Signer


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._speculative = config["parameters"][CANCELS]["string_value"]
        self._signer = Signer.from_environment()

    def execute(self, requests):
        return answer_each(pb_utils, requests, self._respond)

    def _respond(self, request):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        text, stream_id = serving.read_chunk(tensors)
        if stream_id and request.is_cancelled():
            self._cancel(stream_id)
        return {serving.TEXT_OUTPUT.name: text}

    def _cancel(self, stream_id):
        tensors = serving.write_cancel(stream_id, self._signer)
        call = pb_utils.InferenceRequest(
            model_name=self._speculative,
            requested_output_names=[],
            inputs=[pb_utils.Tensor(name, array) for name, array in tensors.items()],
        )
        for _ in call.exec(decoupled=True):
            pass
