"""Turns the ensemble's inputs into one request: validated, with defaults filled in, tokenized."""

import triton_python_backend_utils as pb_utils

from specpipe.text import Tokenizer
from specpipe.text.tools.message_format import MessageFormat
from specpipe.triton import repository, serving
from specpipe.triton.answering import answer_each
from specpipe.triton.secret import Signer


class TritonPythonModel:
    def initialize(self, args):
        self._limits = repository.read_limits(args)
        self._tokenizer = Tokenizer.load(repository.tokenizer_folder(args), self._limits)
        self._tokenizer.warm_up()
        self._calls = MessageFormat.of(self._tokenizer)
        self._signer = Signer.from_environment()

    def execute(self, requests):
        return answer_each(pb_utils, requests, self._respond)

    def _respond(self, request):
        generation = serving.parse_request(
            {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
            self._tokenizer,
            limits=self._limits,
            calls=self._calls,
            parameters=request.parameters(),
            timeout_us=request.timeout(),
        )
        return generation.to_tensors(self._signer)
