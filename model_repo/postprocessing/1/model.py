"""Hands one chunk's text to the client, and a client's cancellation back to `speculative`.

Triton tells a cancellation to this step of the ensemble alone: `speculative`, which is running
since before it, never hears of it by itself.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from specpipe.triton import serving
from specpipe.triton.model_config import CANCELS


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._speculative = config["parameters"][CANCELS]["string_value"]

    def execute(self, requests):
        return [self._respond(request) for request in requests]

    def _respond(self, request):
        if request.is_cancelled():
            self._cancel(pb_utils.get_input_tensor_by_name(request, serving.STREAM_ID.name))
        text = pb_utils.get_input_tensor_by_name(request, serving.TEXT.name).as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor(serving.TEXT_OUTPUT.name, text)])

    def _cancel(self, stream_id):
        call = pb_utils.InferenceRequest(
            model_name=self._speculative,
            requested_output_names=[],
            inputs=[pb_utils.Tensor(serving.CANCEL.name, np.array(stream_id.as_numpy()))],
        )
        for _ in call.exec(decoupled=True):
            pass
