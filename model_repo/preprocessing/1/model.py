"""Turns the ensemble's inputs into one request: validated, with defaults filled in, tokenized."""

import json

import triton_python_backend_utils as pb_utils

from specpipe.errors import SpecpipeError
from specpipe.text import Tokenizer
from specpipe.triton import repository, serving


class TritonPythonModel:
    def initialize(self, args):
        self._tokenizer = Tokenizer.load(repository.tokenizer_folder(args))
        self._tokenizer.warm_up()

    def execute(self, requests):
        return [self._respond(request) for request in requests]

    def _respond(self, request):
        try:
            generation = serving.parse_request(
                {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                self._tokenizer,
                parameters=json.loads(request.parameters() or "{}"),
                timeout_us=request.timeout(),
            )
        except SpecpipeError as exc:
            error = pb_utils.TritonError(str(exc), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, array) for name, array in generation.to_tensors().items()]
        )
